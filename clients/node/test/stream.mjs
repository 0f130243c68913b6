// One Session stream: numbers what it sends, and keeps what it receives by kind.

import { errorOutcome, PATIENCE_MS, sleep } from './wire.mjs';

export const KINDS = ['verdicts', 'leases', 'faults', 'contests'];

export class Stream {
  #call;
  #sent = 0;
  #acked = 0;
  #queues = { verdicts: [], leases: [], faults: [], contests: [], welcome: [] };
  #end;

  constructor(call) {
    this.#call = call;
    call.on('data', (response) => {
      for (const kind of KINDS) this.#queues[kind].push(...response[kind]);
      if (response.welcome) this.#queues.welcome.push(response.welcome);
      this.#acked = Math.max(this.#acked, Number(response.ack_seq));
    });
    call.on('status', (status) => {
      this.#end = status.code === 0 ? { answer: {} } : errorOutcome(status);
    });
    // The same as a status that is not OK; a stream without this listener would throw it.
    call.on('error', () => {});
  }

  send(events, seq = this.#sent + 1) {
    this.#sent = seq;
    this.#call.write({ seq: this.#sent, events });
  }

  async take(kind) {
    await this.#until(() => this.#queues[kind].length > 0, `none of its ${kind}`);
    return this.#queues[kind].shift();
  }

  async acked() {
    await this.#until(() => this.#acked >= this.#sent, `no ack of seq ${this.#sent}`);
  }

  left() {
    const left = Object.entries(this.#queues).filter(([, queue]) => queue.length > 0);
    return left.length ? Object.fromEntries(left) : undefined;
  }

  close() {
    this.#call.end();
  }

  drop() {
    this.#call.cancel();
  }

  async ended() {
    await this.#until(() => this.#end, 'no end');
    return this.#end;
  }

  async #until(condition, complaint) {
    const deadline = Date.now() + PATIENCE_MS;
    while (!condition()) {
      if (Date.now() > deadline || this.#end) {
        const state = JSON.stringify({ end: this.#end, left: this.left() });
        throw new Error(`the stream brought ${complaint}; ${state}`);
      }
      await sleep(5);
    }
  }
}

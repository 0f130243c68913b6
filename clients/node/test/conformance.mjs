// Runs conformance scripts against a live scheduler: node conformance.mjs TARGET SCRIPT...
// Exit status 0 only if every step of every script holds. With SCHEDSVC_TLS_CA_FILE it uses TLS.
// The package's Scheduler makes the calls. Streams, raw bytes and other schemes of authorization go
// over a connection of gRPC.

import { readFile } from 'node:fs/promises';
import { basename } from 'node:path';
import { loadPackageDefinition, Metadata } from '@grpc/grpc-js';
import { CallFailed, Scheduler } from 'schedsvc';
import { load, METHODS } from '../dist/contract.js';
import { fill, lookUp, mismatches } from './matching.mjs';
import { KINDS, Stream } from './stream.mjs';
import { channelCredentials, errorOutcome, PATIENCE_MS, sleep } from './wire.mjs';

const DEADLINE_MS = 30_000;
const POLL_MS = 20;
const contract = loadPackageDefinition(load({ keepCase: true })).schedsvc.v1;
const Client = contract.SchedulerService;
// The methods with fields as the .proto files spell them, which scripts do, too.
const SPELLED = { ...Client.service, ...contract.ExplainService.service };

/** The state of one script: what was saved, calls under way, open streams. */
class Runner {
  #target;
  #client;
  #schedulers = new Map();
  #saved = {};
  #calls = new Map();
  #streams = new Map();

  constructor(target) {
    this.#target = target;
    this.#client = new Client(target, channelCredentials);
  }

  async run(step) {
    const verb = Object.keys(step).find((key) => key in VERBS);
    if (!verb) throw new Error(`no verb in ${JSON.stringify(step)}`);
    try {
      await VERBS[verb](this, step);
    } catch (error) {
      throw new Error(`(${verb} ${step[verb]}) ${step.note ?? ''}: ${error.message}`);
    }
  }

  async call(step) {
    if (!step.until) return this.judge(step, await this.#unary(step.call, step).outcome);
    const until = fill(step.until, this.#saved);
    const deadline = Date.now() + PATIENCE_MS;
    for (;;) {
      const outcome = await this.#unary(step.call, step).outcome;
      const found = mismatches(until, outcome.answer);
      if (!found.length) return this.judge(step, outcome);
      if (Date.now() > deadline) throw new Error(found.join('; '));
      await sleep(POLL_MS);
    }
  }

  async start(step) {
    const started = this.#unary(step.start, step);
    this.#calls.set(step.as, started);
    started.outcome.then((outcome) => (started.result = outcome));
    // The call has to be on its way before the next step is.
    await sleep(POLL_MS);
  }

  async waits(step) {
    await sleep(step.for_ms);
    const { result } = this.#calls.get(step.waits);
    if (result) throw new Error(`it was answered: ${JSON.stringify(result)}`);
  }

  async finish(step) {
    const { outcome } = this.#calls.get(step.finish);
    this.#calls.delete(step.finish);
    this.judge(step, await outcome);
  }

  cancel(step) {
    this.#calls.get(step.cancel).cancel();
  }

  open(step) {
    this.#streams.set(step.open, new Stream(this.#client.Session(metadataOf(step))));
  }

  stream(name) {
    return this.#streams.get(name);
  }

  send(step) {
    this.stream(step.send).send(fill(step.events, this.#saved), step.seq);
  }

  async receive(step) {
    const stream = this.stream(step.receive);
    const answer = {};
    const expect = {};
    for (const kind of KINDS.filter((name) => name in step)) {
      answer[kind] = [];
      for (const _ of step[kind]) answer[kind].push(await stream.take(kind));
      expect[kind] = step[kind];
    }
    if ('welcome' in step) {
      answer.welcome = await stream.take('welcome');
      expect.welcome = step.welcome;
    }
    if (step.acked) await stream.acked();
    this.judge({ ...step, expect }, { answer });
  }

  async quiet(step) {
    await sleep(step.for_ms);
    const left = this.stream(step.quiet).left();
    if (left) throw new Error(`it brought ${JSON.stringify(left)}`);
  }

  judge(step, outcome) {
    let found;
    if (step.error) {
      if (!outcome.error) throw new Error(`it did not fail: ${JSON.stringify(outcome.answer)}`);
      const { field, ...expected } = step.error;
      if (field !== undefined) expected.field = { $has: field };
      found = mismatches(expected, outcome.error);
    } else {
      if (outcome.error) throw new Error(`it failed: ${JSON.stringify(outcome.error)}`);
      found = mismatches(fill(step.expect ?? {}, this.#saved), outcome.answer);
    }
    if (found.length) throw new Error(found.join('; '));
    for (const [name, path] of Object.entries(step.save ?? {})) {
      this.#saved[name] = lookUp(outcome.answer, path);
    }
  }

  checkNothingLeft() {
    if (this.#calls.size) throw new Error(`not finished: ${[...this.#calls.keys()]}`);
    for (const [name, stream] of this.#streams) {
      if (stream.left()) throw new Error(`${name}: not received ${JSON.stringify(stream.left())}`);
    }
  }

  async close() {
    for (const stream of this.#streams.values()) stream.drop();
    this.#client.close();
    for (const scheduler of this.#schedulers.values()) await scheduler.close();
  }

  /** The client of the caller that a step names by its token. */
  #scheduler({ metadata: { authorization = '' } = {} }) {
    const token = authorization.replace(/^Bearer /, '');
    const known = this.#schedulers.get(token);
    const scheduler = known ?? new Scheduler(this.#target, { token, channelCredentials });
    this.#schedulers.set(token, scheduler);
    return scheduler;
  }

  #unary(name, step) {
    const spelled = SPELLED[name];
    const bytes = step.raw
      ? Buffer.from(fill(step.raw, this.#saved), 'hex')
      : spelled.requestSerialize(fill(step.request ?? {}, this.#saved));
    const deadlineMs = step.deadline_ms ?? DEADLINE_MS;
    const isOffered = !step.raw && /^(Bearer|$)/.test(step.metadata?.authorization ?? '');
    if (!isOffered) return this.#direct(spelled, step, bytes, deadlineMs);
    const { requestDeserialize, responseSerialize } = METHODS[name];
    const asked = requestDeserialize(bytes);
    const controller = new AbortController();
    const { signal } = controller;
    const outcome = this.#scheduler(step).call(name, asked, { signal, deadlineMs }).then(
      (answer) => ({ answer: spelled.responseDeserialize(responseSerialize(answer)) }),
      (error) => {
        if (error instanceof CallFailed) return errorOutcome(error.cause);
        if (error === signal.reason) return { error: { code: 'CANCELLED' } };
        throw error;
      },
    );
    return { outcome, cancel: () => controller.abort() };
  }

  #direct({ path, responseDeserialize }, step, bytes, deadlineMs) {
    const options = { deadline: Date.now() + deadlineMs };
    const started = {};
    started.outcome = new Promise((resolve) => {
      const call = this.#client.makeUnaryRequest(
        path,
        () => bytes,
        responseDeserialize,
        bytes,
        metadataOf(step),
        options,
        (error, answer) => resolve(error ? errorOutcome(error) : { answer }),
      );
      started.cancel = () => call.cancel();
    });
    return started;
  }
}

const VERBS = {
  call: (runner, step) => runner.call(step),
  start: (runner, step) => runner.start(step),
  waits: (runner, step) => runner.waits(step),
  finish: (runner, step) => runner.finish(step),
  cancel: (runner, step) => runner.cancel(step),
  open: (runner, step) => runner.open(step),
  send: (runner, step) => runner.send(step),
  receive: (runner, step) => runner.receive(step),
  quiet: (runner, step) => runner.quiet(step),
  close: (runner, step) => runner.stream(step.close).close(),
  drop: (runner, step) => runner.stream(step.drop).drop(),
  ended: async (runner, step) => runner.judge(step, await runner.stream(step.ended).ended()),
  sleep_ms: (_, step) => sleep(step.sleep_ms),
};

function metadataOf(step) {
  const metadata = new Metadata();
  for (const [name, value] of Object.entries(step.metadata ?? {})) metadata.set(name, value);
  return metadata;
}

async function runScript(target, path) {
  const { steps } = JSON.parse(await readFile(path, 'utf8'));
  const runner = new Runner(target);
  let number = 0;
  try {
    for (const step of steps) {
      number += 1;
      await runner.run(step);
    }
    runner.checkNothingLeft();
    console.log(`ok   ${basename(path)}: ${steps.length} steps`);
    return true;
  } catch (error) {
    console.log(`FAIL ${basename(path)} step ${number} ${error.message}`);
    return false;
  } finally {
    await runner.close();
  }
}

const [target, ...scripts] = process.argv.slice(2);
if (!scripts.length) {
  console.error('usage: node conformance.mjs TARGET SCRIPT...');
  process.exit(2);
}
let failures = 0;
for (const script of scripts) failures += (await runScript(target, script)) ? 0 : 1;
process.exit(failures ? 1 : 0);

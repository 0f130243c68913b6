// A scheduler inside the process, for unit tests of code that asks one: it answers as the test
// scripts it, and keeps what it was sent. It has no queue, no limits and no fairness.

import { Metadata, Server, ServerCredentials, type ServerUnaryCall, status } from '@grpc/grpc-js';
import type { Grant } from './build/schedsvc/v1/Grant';
import type { Leadership } from './build/schedsvc/v1/Leadership';
import type { LeaseProgress__Output } from './build/schedsvc/v1/LeaseProgress';
import type { Refusal } from './build/schedsvc/v1/Refusal';
import {
  type Answer, type Asked, checkMessage, checkNames, checkObject, hold, METHODS, type Method,
  SERVICES,
} from './contract';
import type { Outcome } from './index';

export { status };

/** The answer to one Admit, or how its call fails; `delayMs` holds it back. */
export type Verdict = { delayMs?: number } & (
  | { outcome: Outcome; grant?: Grant; refusal?: Refusal }
  | { code: status; details: string }
);

/** A grant; the fake numbers the leases and knows the rest. */
export const grant = (fields: Grant = {}): Verdict => ({
  outcome: 'OUTCOME_GRANTED',
  grant: fields,
});

/** A refusal or eviction, e.g. `refusal('OUTCOME_REJECTED_QUOTA', { retryAfterMs: 500 })`. */
export const refusal = (outcome: Outcome, fields: Refusal = {}): Verdict => ({
  outcome,
  refusal: fields,
});

/** A call that fails, e.g. `failure(status.UNAVAILABLE)`. */
export const failure = (code: status, details = 'as the test asked'): Verdict => ({
  code,
  details,
});

/** A verdict that comes after some time; after Infinity: when `release()` is called. */
export const delayed = (delayMs: number, verdict = grant()): Verdict => ({ ...verdict, delayMs });

// Return a verdict that can be given; throw a TypeError that names what is wrong in it.
function checked(verdict: Verdict): Verdict {
  checkObject('the verdict', verdict);
  const { delayMs = 0, ...given } = verdict;
  hold(typeof delayMs === 'number' && delayMs >= 0, 'delayMs', delayMs, 'a number, 0 or more');
  if ('code' in given) checkCode(given.code);
  else {
    checkMessage('AdmitResponse', given);
    const { outcome, grant, refusal } = given;
    const isGrant = outcome === 'OUTCOME_GRANTED';
    hold(outcome !== undefined, 'the outcome', outcome, 'one of the contract');
    hold(!(isGrant && refusal), 'the outcome of a refusal', outcome, 'a refusal or an eviction');
    hold(isGrant || !grant, 'the outcome of a grant', outcome, 'OUTCOME_GRANTED');
  }
  return verdict;
}

function checkCode(code: unknown): void {
  const isFailure = typeof code === 'number' && code in status && code !== status.OK;
  hold(isFailure, 'the code of a failure', code, 'one of `status`, and not OK');
}

type Admit = Asked<'Admit'> & { requestId: string };

/** What the fake knows of one lease. */
export interface FakeLease {
  readonly request: Admit;
  /** Each report of running totals, renewals included. */
  readonly reports: LeaseProgress__Output[];
  /** Each Complete: the first one ends the lease. */
  readonly ends: Asked<'Complete'>[];
  /** What renewals are answered; set it to 'LEASE_STATE_VOID' and the client has to stop. */
  state: Answer<'Progress'>['leases'][number]['state'];
  readonly grant: Grant;
}

class Lease implements FakeLease {
  readonly reports: LeaseProgress__Output[] = [];
  readonly ends: Asked<'Complete'>[] = [];
  #state: FakeLease['state'] = 'LEASE_STATE_LIVE';

  constructor(readonly request: Admit, readonly grant: Grant) {}

  get state(): FakeLease['state'] {
    return this.#state;
  }

  set state(state: FakeLease['state']) {
    checkMessage('LeaseStatus', { state });
    this.#state = state;
  }
}

type Reply = (error: object | null, answer?: object) => void;

export class FakeScheduler {
  /** Where it listens, once it has started; it keeps its port over stop() and start(). */
  target = '127.0.0.1:0';
  /** Decides what no script decides: it grants. */
  decide: (request: Admit) => Verdict = () => grant();
  ttlMs = 30_000;
  /** Whether it takes calls and never answers. */
  hangs = false;
  /** Its term, and the target of the leader, if it does not lead. */
  leadership: Leadership | null = null;
  leader: string | undefined;
  /** Every Admit in its order, and the ids of those that their client withdrew. */
  readonly requests: Admit[] = [];
  readonly withdrawn: string[] = [];
  readonly leases = new Map<string, FakeLease>();
  /** Every call: its method and its metadata. */
  readonly calls: { method: Method; metadata: Record<string, unknown> }[] = [];
  #script: Verdict[] = [];
  #failures = new Map<Method, number[]>();
  #held = new Map<string, (verdict: Verdict) => void>();
  #server = new Server();

  constructor() {
    // Name a property that does not exist instead of taking it in silence.
    if (new.target === FakeScheduler) Object.preventExtensions(this);
  }

  /** Answer the next Admits so, one after the other. */
  script(...verdicts: Verdict[]): void {
    this.#script.push(...verdicts.map(checked));
  }

  /** Let the next calls of a method fail, one for each of these codes. */
  fail(method: Method, ...codes: status[]): void {
    checkNames('method', { [method]: codes }, Object.keys(METHODS));
    hold(codes.length > 0, 'the list of codes', codes, 'of one code at least');
    codes.forEach(checkCode);
    this.#failures.set(method, [...(this.#failures.get(method) ?? []), ...codes]);
  }

  /** Answer an Admit that is held back. */
  release(requestId: string, verdict = grant()): void {
    const give = this.#held.get(requestId);
    if (!give) throw new Error(`no Admit of ${requestId} is held back`);
    give(checked(verdict));
  }

  async start(): Promise<void> {
    this.#server = new Server();
    const methods: { [M in Method]?: (asked: any) => object } = {
      Progress: (asked) => ({
        leases: asked.leases.map(this.#progress),
        leadership: this.leadership,
      }),
      Complete: (asked) => this.#complete(asked),
      Explain: ({ requestId }) => ({ requests: this.#stories(requestId) }),
      Stats: () => ({ totals: { liveLeases: this.live.length, received: this.requests.length } }),
    };
    const handlers = Object.entries({ ...methods, Admit: undefined }).map(([name, answer]) => {
      const method = name as Method;
      const handle = (call: ServerUnaryCall<any, object>, reply: Reply) => {
        const error = this.#failureOf(method, call.metadata);
        if (error) reply(error);
        else if (this.hangs && method !== 'Admit') return;
        else if (!answer) this.#admit(call, reply);
        else {
          const found = answer(call.request);
          if ('code' in found) reply(found);
          else reply(null, found);
        }
      };
      return [name, handle] as const;
    });
    for (const service of SERVICES) this.#server.addService(service, Object.fromEntries(handlers));
    const port = await new Promise<number>((resolve, reject) => {
      const insecure = ServerCredentials.createInsecure();
      this.#server.bindAsync(this.target, insecure, (error, bound) =>
        error ? reject(error) : resolve(bound),
      );
    });
    this.target = `127.0.0.1:${port}`;
  }

  /** Break all calls, and listen no more. */
  stop(): void {
    this.#server.forceShutdown();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.stop();
  }

  /** The leases that have not ended. */
  get live(): FakeLease[] {
    return [...this.leases.values()].filter(({ ends }) => !ends.length);
  }

  #failureOf(method: Method, metadata: Metadata): object | undefined {
    this.calls.push({ method, metadata: metadata.getMap() });
    const code = this.#failures.get(method)?.shift();
    if (code !== undefined) return failure(code);
    if (this.leader === undefined) return undefined;
    const named = new Metadata();
    named.set('schedsvc-leader', this.leader);
    return { ...failure(status.UNAVAILABLE, 'another scheduler leads'), metadata: named };
  }

  #admit(call: ServerUnaryCall<Admit, object>, reply: Reply): void {
    const { request } = call;
    const { requestId } = request;
    this.requests.push(request);
    const settle = (verdict: Verdict) => {
      clearTimeout(timer);
      if (!this.#held.delete(requestId)) return;
      if ('code' in verdict) reply(verdict);
      else reply(null, { ...this.#granted(request, verdict), leadership: this.leadership });
    };
    this.#held.set(requestId, settle);
    call.on('cancelled', () => {
      clearTimeout(timer);
      if (this.#held.delete(requestId)) this.withdrawn.push(requestId);
    });
    let timer: NodeJS.Timeout | undefined;
    if (this.hangs) return;
    const verdict = this.#script.shift() ?? this.#decided(request);
    const delayMs = verdict.delayMs ?? 0;
    if (!delayMs) settle(verdict);
    else if (delayMs < Infinity) timer = setTimeout(settle, delayMs, verdict);
  }

  #decided(request: Admit): Verdict {
    try {
      return checked(this.decide(request));
    } catch (error) {
      return failure(status.INTERNAL, `FakeScheduler.decide: ${error}`);
    }
  }

  // The lease of a grant; a repeat of its request gets the same one.
  #granted(request: Admit, verdict: Verdict): object {
    if (!('outcome' in verdict) || verdict.outcome !== 'OUTCOME_GRANTED') return verdict;
    const { requestId, tenant } = request;
    const known = [...this.leases.values()].find(
      (lease) => lease.request.requestId === requestId && lease.request.tenant === tenant,
    );
    if (known) return { ...verdict, grant: known.grant };
    const leaseId = String(verdict.grant?.leaseId ?? this.leases.size + 1);
    const defaults = { pool: 'main', poolEpoch: '1', ttlMs: this.ttlMs, reservedTokens: 64 };
    const given: Grant = { ...defaults, ...verdict.grant, leaseId };
    this.leases.set(leaseId, new Lease(request, given));
    return { ...verdict, grant: given };
  }

  #progress = (report: LeaseProgress__Output) => {
    const lease = this.leases.get(report.leaseId);
    lease?.reports.push(report);
    const state = lease?.ends.length ? 'LEASE_STATE_ENDED' : lease?.state;
    return { leaseId: report.leaseId, state: state ?? 'LEASE_STATE_UNKNOWN' };
  };

  #complete(asked: Asked<'Complete'>): object {
    const lease = this.leases.get(`${asked.leaseId}`);
    if (!lease) return failure(status.NOT_FOUND, `lease ${asked.leaseId} is unknown`);
    lease.ends.push(asked);
    return { ...lease.ends[0], leadership: this.leadership };
  }

  #stories(requestId: string): object[] {
    return [...this.leases.values()]
      .filter(({ request }) => request.requestId === requestId)
      .map(({ ends }) => ({ state: ends.length ? 'REQUEST_STATE_ENDED' : 'REQUEST_STATE_LIVE' }));
  }
}

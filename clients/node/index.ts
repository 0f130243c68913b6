// Client of the schedsvc scheduler: an admission is the right of one request to run on an engine,
// and it is completed on every way out.

import { randomUUID } from 'node:crypto';
import { setTimeout as sleep } from 'node:timers/promises';
import {
  type ChannelCredentials, Client, type ClientOptions, credentials, Metadata, status,
} from '@grpc/grpc-js';
import { Admission, END_DEADLINE_MS, type EndOutcome, NOTHING_USED } from './admission';
import type { AdmitRequest } from './build/schedsvc/v1/AdmitRequest';
import type { Outcome } from './build/schedsvc/v1/Outcome';
import type { RequestStory__Output as RequestStory } from './build/schedsvc/v1/RequestStory';
import type { StatsRequest } from './build/schedsvc/v1/StatsRequest';
import type { StatsResponse__Output as StatsResponse } from './build/schedsvc/v1/StatsResponse';
import type { Answer, Asked, Method } from './contract';
import { checkOptions, checkRequest, hold, METHODS } from './contract';
import { CallFailed, Refused } from './errors';
import { fenceOf, isLocal, Targets } from './targets';

export { Admission, CallFailed, credentials, Refused };
export type { Books, Totals } from './admission';
export type { Limit } from './errors';
export type { AdmitRequest, Answer, Asked, Method, Outcome, RequestStory, StatsResponse };

// Progress carries totals, so a repeat is harmless. Admit is for its caller to repeat; Complete is
// repeated below, for as long as the lease may live.
const SERVICE_CONFIG = {
  methodConfig: [
    {
      name: [{ service: 'schedsvc.v1.SchedulerService', method: 'Progress' }],
      retryPolicy: {
        maxAttempts: 5,
        initialBackoff: '0.1s',
        maxBackoff: '2s',
        backoffMultiplier: 2,
        retryableStatusCodes: ['UNAVAILABLE'],
      },
    },
  ],
};

// How long withAdmission() holds its result back for an end that has to be repeated.
const END_WAIT_MS = 1_000;
// Answers about the caller, which every scheduler would give.
const OF_CALLER = [
  status.INVALID_ARGUMENT,
  status.OUT_OF_RANGE,
  status.ALREADY_EXISTS,
  status.NOT_FOUND,
  status.UNAUTHENTICATED,
  status.PERMISSION_DENIED,
  status.RESOURCE_EXHAUSTED,
];
// Unanswered probes in a row after which a scheduler that holds a call is silent.
const PROBES = 3;
// Prefix hashes of one request; the scheduler refuses more.
const PREFIX_HASHES_MAX = 4_096;

export interface SchedulerOptions {
  /** Bearer token of this caller. */
  token?: string;
  /** For TLS: `credentials.createSsl(...)` of this package. */
  channelCredentials?: ChannelCredentials;
  /** More options of grpc-js for the channel, interceptors among them. */
  channel?: ClientOptions;
  /** With several targets: how long a call looks for one that leads (5,000). */
  failoverWaitMs?: number;
  /** With several targets: after which silence to leave one (1,500). */
  silentAfterMs?: number;
}

export interface CallOptions {
  /** Withdraws the call. */
  signal?: AbortSignal;
  /** The longest wait for the answer. */
  deadlineMs?: number;
}

/** A client of one scheduler, or of several of which one leads. */
export class Scheduler {
  #targets;
  #fence;
  #clients = new Map<string, Client>();
  #options;
  #probe = { target: '', missed: 0, atMs: 0 };
  #open = new Set<Admission>();
  #ending = new Set<Promise<unknown>>();
  #waiting = new Set<AbortController>();
  #closed: Error | undefined;

  /**
   * @param target e.g. 'unix:/run/schedsvc/schedsvc.sock' or 'scheduler:50051'; several, separated
   *   by commas: the leader and its standbys
   */
  constructor(target: string, options: SchedulerOptions = {}) {
    checkOptions(options, {
      token: 'string',
      channelCredentials: 'object',
      channel: 'object',
      failoverWaitMs: 'number',
      silentAfterMs: 'number',
    });
    const { token, channelCredentials, channel, failoverWaitMs, silentAfterMs } = options;
    this.#options = {
      token,
      channelCredentials: channelCredentials ?? credentials.createInsecure(),
      channel,
      failoverWaitMs: failoverWaitMs ?? 5_000,
      silentAfterMs: silentAfterMs ?? 1_500,
    };
    hold(typeof target === 'string', 'target', target, 'a string');
    this.#targets = new Targets(target);
    this.#fence = fenceOf(this.#targets.all);
  }

  /**
   * Ask for one request, and wait for the verdict: the right to run. End it, or use
   * `withAdmission()`. `requestId` is made up if it is absent.
   *
   * @throws {Refused} the scheduler refuses the request
   * @throws {CallFailed} the call itself failed
   */
  async admit(request: AdmitRequest, options: CallOptions = {}): Promise<Admission> {
    checkCall('Admit', request, options);
    const hashes = request.prefixBlockHashes?.length ?? 0;
    if (hashes > PREFIX_HASHES_MAX) {
      const text = `has ${hashes} hashes; at most ${PREFIX_HASHES_MAX} are allowed`;
      const details = `prefix_block_hashes: ${text}`;
      throw new CallFailed('Admit', { code: status.INVALID_ARGUMENT, details });
    }
    if (this.#closed) throw this.#closed;
    options.signal?.throwIfAborted();
    const asked = { ...request, requestId: request.requestId ?? randomUUID() };
    // Not AbortSignal.any(): on Node 20 a signal that lives long keeps what it gives for ever.
    const waiting = new AbortController();
    const { signal } = waiting;
    const leave = () => waiting.abort(options.signal?.reason);
    options.signal?.addEventListener('abort', leave, { once: true });
    this.#waiting.add(waiting);
    try {
      const admission = await this.#admit(asked, { ...options, signal });
      if (!signal.aborted) return admission;
      await admission.cancel(NOTHING_USED);
      throw signal.reason;
    } catch (error) {
      const isLate = error instanceof CallFailed && error.code === status.DEADLINE_EXCEEDED;
      if (signal.aborted || isLate) this.#goesOn(this.#giveBack(asked));
      throw error;
    } finally {
      options.signal?.removeEventListener('abort', leave);
      this.#waiting.delete(waiting);
    }
  }

  async #admit(request: AdmitRequest, options: CallOptions): Promise<Admission> {
    const response = await this.call('Admit', request, options);
    const { requestId = '' } = request;
    if (response.outcome !== 'OUTCOME_GRANTED') throw new Refused(requestId, response);
    const onEnd = () => this.#open.delete(admission);
    const admission = new Admission(this, requestId, response, onEnd);
    this.#open.add(admission);
    return admission;
  }

  // Return a grant that was on its way when its request was withdrawn: a repeat gets the same one.
  async #giveBack({ requestId = '', tenant = '', ...request }: AdmitRequest): Promise<void> {
    const stories = await this.explain(requestId, { tenant, deadlineMs: END_DEADLINE_MS });
    if (!stories.some(({ state }) => state === 'REQUEST_STATE_LIVE')) return;
    const again = { ...request, requestId, tenant, queueTtlMs: 1 };
    await (await this.#admit(again, { deadlineMs: END_DEADLINE_MS })).cancel(NOTHING_USED);
  }

  /**
   * Run `work(admission)` as soon as the request is granted, and end the lease whatever happens:
   * as completed if it returns, as cancelled if it throws.
   */
  async withAdmission<T>(
    request: AdmitRequest, work: (admission: Admission) => T | Promise<T>, options?: CallOptions,
  ): Promise<T> {
    const admission = await this.admit(request, options);
    let outcome: EndOutcome = 'OUTCOME_CANCELLED';
    try {
      const result = await work(admission);
      outcome = 'OUTCOME_COMPLETED';
      return result;
    } finally {
      // A failure to end the lease must not cost the caller its result, nor hide its error.
      const ended = admission.end(outcome).catch((error) => {
        process.emitWarning(`lease ${admission.leaseId} was not ended, it will expire: ${error}`);
      });
      const waited = new AbortController();
      const wait = sleep(END_WAIT_MS, undefined, { signal: waited.signal }).catch(() => {});
      await Promise.race([ended, wait]);
      waited.abort();
    }
  }

  /** A snapshot of pools, flows and counters. */
  stats(request: StatsRequest = {}): Promise<StatsResponse> {
    return this.call('Stats', request);
  }

  /**
   * Ask for a request's place in the queue, why it waits, or why it was refused; none if the
   * scheduler does not know it. `message` says it for a person.
   */
  async explain(
    requestId: string, { tenant = '', ...options }: CallOptions & { tenant?: string } = {},
  ): Promise<RequestStory[]> {
    return (await this.call('Explain', { requestId, tenant }, options)).requests;
  }

  /**
   * Withdraw what waits, cancel what runs, wait until the scheduler knows of every end, and hang
   * up. If it is away, that takes until the leases have expired.
   */
  async close(): Promise<void> {
    this.#closed = new Error('the Scheduler was closed');
    for (const waiting of this.#waiting) waiting.abort(this.#closed);
    for (const admission of this.#open) this.#goesOn(admission.cancel());
    while (this.#ending.size) await Promise.all(this.#ending);
    for (const client of this.#clients.values()) client.close();
  }

  /** `await using` closes it. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  // Let close() wait for what goes on without its caller.
  #goesOn(work: Promise<unknown>): void {
    const going = work.catch(() => {}).finally(() => this.#ending.delete(going));
    this.#ending.add(going);
  }

  #client(target: string): Client {
    const known = this.#clients.get(target);
    if (known) return known;
    const retries = this.#targets.several
      ? {}
      : { 'grpc.service_config': JSON.stringify(SERVICE_CONFIG) };
    const client = new Client(target, this.#options.channelCredentials, {
      'grpc.initial_reconnect_backoff_ms': 100,
      'grpc.max_reconnect_backoff_ms': 1_000,
      // Else a name that got another address is not looked up again for 30 s.
      'grpc.dns_min_time_between_resolutions_ms': 1_000,
      ...retries,
      // grpc-js obeys grpc_proxy, https_proxy and http_proxy even for loopback addresses.
      ...(isLocal(target) ? { 'grpc.enable_http_proxy': 0 } : {}),
      ...this.#options.channel,
    });
    this.#clients.set(target, client);
    return client;
  }

  /**
   * Make any unary call of the scheduler; with several targets, at one after the other, inside the
   * deadline.
   */
  async call<M extends Method>(
    method: M, request: Asked<M>, options: CallOptions = {},
  ): Promise<Answer<M>> {
    checkCall(method, request, options);
    const { signal, deadlineMs } = options;
    const endsMs = deadlineMs === undefined ? Infinity : Date.now() + deadlineMs;
    let awaySinceMs = performance.now();
    for (;;) {
      const target = this.#targets.current;
      const beganMs = performance.now();
      try {
        const response = await this.#attempt(target, method, request, signal, endsMs);
        this.#check(target, method, response as Answer<Method>);
        return response;
      } catch (error) {
        const elsewhere = error instanceof CallFailed && !OF_CALLER.includes(error.code);
        if (!this.#targets.several || !elsewhere) throw error;
        const nowMs = performance.now();
        // A call that was watched is cancelled by this client alone.
        const isSilent = [status.DEADLINE_EXCEEDED, status.CANCELLED].includes(error.code);
        const silentMs = isSilent ? this.#options.silentAfterMs : 0;
        this.#targets.moveOn(target, error.leader, { nowMs, silentMs });
        // It was held by a scheduler that answered until then.
        if (nowMs - beganMs > this.#options.failoverWaitMs) awaySinceMs = nowMs;
        const pauseMs = this.#targets.pauseMsMax(nowMs) * Math.random();
        const isLate = nowMs - awaySinceMs > this.#options.failoverWaitMs;
        if (isLate || Date.now() + pauseMs >= endsMs) throw error;
        await sleep(pauseMs);
      }
    }
  }

  // Drop an answer of a scheduler that leads no more: only the latest leader's have an effect.
  #check(target: string, method: Method, response: Answer<Method>): void {
    if ('leadership' in response && !this.#fence.obeys(response.leadership)) {
      const term = response.leadership?.term ?? 0;
      const details = `${target} answers under term ${term}, but ${this.#fence.term} is known`;
      throw new CallFailed(method, { code: status.UNAVAILABLE, details });
    }
    this.#targets.answered();
  }

  #attempt<M extends Method>(
    target: string, method: M, request: Asked<M>, signal: AbortSignal | undefined, endsMs: number,
  ): Promise<Answer<M>> {
    const { token, silentAfterMs } = this.#options;
    const isWatched = this.#targets.several && silentAfterMs > 0;
    // An Admit may be held for long, so it is probed. Others are answered at once.
    const isHeld = method === 'Admit';
    const limitMs = isWatched && !isHeld ? Date.now() + silentAfterMs : Infinity;
    const deadline = Math.min(endsMs, limitMs);
    const options = deadline < Infinity ? { deadline } : {};
    const metadata = new Metadata();
    if (token) metadata.set('authorization', `Bearer ${token}`);
    if (this.#fence.term) metadata.set('schedsvc-term', String(this.#fence.term));
    const { path, requestSerialize, responseDeserialize } = METHODS[method];
    return new Promise((resolve, reject) => {
      signal?.throwIfAborted();
      let watch: NodeJS.Timeout | undefined;
      const call = this.#client(target).makeUnaryRequest(
        path,
        requestSerialize as (value: Asked<M>) => Buffer,
        responseDeserialize as (bytes: Buffer) => object as (bytes: Buffer) => Answer<M>,
        request,
        metadata,
        options,
        (error, response) => {
          clearInterval(watch);
          signal?.removeEventListener('abort', cancel);
          if (error) reject(signal?.aborted ? signal.reason : new CallFailed(method, error));
          else resolve(response!);
        },
      );
      const cancel = () => call.cancel();
      signal?.addEventListener('abort', cancel, { once: true });
      if (isWatched && isHeld) {
        watch = setInterval(async () => {
          if (await this.#isSilent(target)) cancel();
        }, silentAfterMs / PROBES);
      }
    });
  }

  // Whether the scheduler that holds calls of this client answers nothing any more. Each probe has
  // its own deadline, so a process that stood still loses one probe at most.
  async #isSilent(target: string): Promise<boolean> {
    const stepMs = this.#options.silentAfterMs / PROBES;
    if (this.#probe.target !== target) this.#probe = { target, missed: 0, atMs: -Infinity };
    const probe = this.#probe;
    if (performance.now() - probe.atMs >= 0.9 * stepMs) {
      probe.atMs = performance.now();
      const untilMs = Date.now() + stepMs;
      try {
        const found = await this.#attempt(target, 'Progress', {}, undefined, untilMs);
        // An answer under a term that is over is none.
        const isObeyed = this.#fence.obeys(found.leadership);
        probe.missed = isObeyed ? 0 : probe.missed + 1;
      } catch (error) {
        const isLate = error instanceof CallFailed && error.code === status.DEADLINE_EXCEEDED;
        probe.missed = isLate ? probe.missed + 1 : 0;
      }
    }
    return probe.missed >= PROBES;
  }
}

function checkCall<M extends Method>(method: M, request: Asked<M>, options: CallOptions): void {
  checkRequest(method, request);
  checkOptions(options, { signal: 'AbortSignal', deadlineMs: 'number' });
}

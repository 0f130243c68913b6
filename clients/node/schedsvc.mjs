// Client of the schedsvc scheduler: an admission is the right of one request to run on an engine,
// and it is completed on every way out.

import { randomUUID } from 'node:crypto';
import { setTimeout as sleep } from 'node:timers/promises';
import { credentials, Metadata, status } from '@grpc/grpc-js';
import { errorDetails, serviceClient } from './contract.mjs';
import { fenceOf, Targets } from './targets.mjs';

const SERVICE = 'schedsvc.v1.SchedulerService';

// Progress carries totals, so a repeat is harmless. Admit is for its caller to repeat; Complete is
// repeated below, for as long as the lease may live.
const SERVICE_CONFIG = {
  methodConfig: [
    {
      name: [{ service: SERVICE, method: 'Progress' }],
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

// The time of one attempt to end a lease.
const END_DEADLINE_MS = 5_000;
const END_BACKOFF_MIN_MS = 50;
const END_BACKOFF_MAX_MS = 2_000;
// How long the scheduler keeps an expired lease: past it a Complete is no longer repeated.
const LEASE_GRACE_MS = 20_000;
// How long withAdmission() holds its result back for an end that has to be repeated.
const END_WAIT_MS = 1_000;
const PASSING = [status.UNAVAILABLE, status.DEADLINE_EXCEEDED];
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
// Their answers have an effect on requests, so only the latest leader may give them.
const FENCED = new Set(['Admit', 'Progress', 'Complete']);
// Unanswered probes in a row after which a scheduler that holds a call is silent.
const PROBES = 3;
// Prefix hashes of one request; the scheduler refuses more.
const PREFIX_HASHES_MAX = 4_096;

/** The scheduler's verdict is that the request does not run. */
export class Refused extends Error {
  constructor({ outcome, refusal, queueDurationUs }) {
    super(refusal?.message || outcome);
    this.name = 'Refused';
    /** One of the contract's outcomes, e.g. 'OUTCOME_REJECTED_FLOW_QUEUE_FULL'. */
    this.outcome = outcome;
    /** When to retry; 0: a retry cannot help. */
    this.retryAfterMs = Number(refusal?.retryAfterMs ?? 0);
    /** Requests that were ahead of it in the tenant's queue. */
    this.queuePosition = Number(refusal?.queuePosition ?? 0);
    /** The limits of the tenant: `kind`, `limit`, `remaining`, `resetMs`. */
    this.limits = (refusal?.quota?.limits ?? []).map((limit) => ({
      kind: limit.kind,
      limit: Number(limit.limit),
      remaining: Number(limit.remaining),
      resetMs: Number(limit.resetMs),
    }));
    this.queueDurationMs = Number(queueDurationUs) / 1_000;
  }
}

/** A call failed. `code` is gRPC's number, `fields` names what was wrong in the request. */
export class CallFailed extends Error {
  constructor(method, error) {
    const { fields, retryAfterMs } = errorDetails(error);
    const named = fields.map(({ field, description }) => `${field}: ${description}`).join('; ');
    super(`${method}: ${named || error.details || error.message}`, { cause: error });
    this.name = 'CallFailed';
    this.code = error.code;
    this.fields = fields;
    this.retryAfterMs = retryAfterMs;
    /** The target of the leader, if a scheduler that does not lead named it. */
    this.leader = error.metadata?.get('schedsvc-leader')[0];
  }
}

// Whether a target is on this host by its name: a Unix socket, or a loopback address.
function isLocal(target) {
  if (target.startsWith('unix:')) return true;
  const address = target.replace(/^(dns|ipv4|ipv6):(.*\/)?/, '');
  const host = address.replace(/:\d+$/, '').replace(/^\[|\]$|\.$/g, '').toLowerCase();
  return (
    host === 'localhost' ||
    host.endsWith('.localhost') ||
    ['0.0.0.0', '::', '::1'].includes(host) ||
    /^(::ffff:)?127(\.\d{1,3}){3}$/.test(host)
  );
}

/** A client of one scheduler, or of several of which one leads. */
export class Scheduler {
  #targets;
  #fence;
  #clients = new Map();
  #credentials;
  #channel;
  #token;
  #failoverWaitMs;
  #silentAfterMs;
  #probe = { target: '', missed: 0, atMs: 0 };

  /**
   * @param {string} target e.g. 'unix:/run/schedsvc/schedsvc.sock' or 'scheduler:50051'; several,
   *   separated by commas: the leader and its standbys
   * @param {object} [options]
   * @param {string} [options.token] bearer token of this caller
   * @param {import('@grpc/grpc-js').ChannelCredentials} [options.channelCredentials] for TLS
   * @param {object} [options.channel] more channel options of grpc-js
   * @param {number} [options.failoverWaitMs] with several targets: how long a call looks for one
   *   that leads
   * @param {number} [options.silentAfterMs] with several targets: after which silence to leave one
   */
  constructor(
    target,
    { token, channelCredentials, channel, failoverWaitMs = 5_000, silentAfterMs = 1_500 } = {},
  ) {
    this.#token = token;
    this.#targets = new Targets(target);
    this.#fence = fenceOf(this.#targets.all);
    this.#credentials = channelCredentials ?? credentials.createInsecure();
    this.#channel = channel;
    this.#failoverWaitMs = failoverWaitMs;
    this.#silentAfterMs = silentAfterMs;
  }

  /**
   * Ask for one request, and wait for the verdict. Fields as in AdmitRequest, in camel case;
   * `requestId` is made up where it is absent.
   *
   * @param {object} request
   * @param {object} [options]
   * @param {AbortSignal} [options.signal] withdraws the request
   * @param {number} [options.deadlineMs] the longest wait for the verdict
   * @returns {Promise<Admission>} the right to run; end it, or use withAdmission()
   * @throws {Refused} the scheduler said no
   * @throws {CallFailed} the call itself failed
   */
  async admit(request, options) {
    const hashes = request.prefixBlockHashes?.length ?? 0;
    if (hashes > PREFIX_HASHES_MAX) {
      const text = `has ${hashes} hashes; at most ${PREFIX_HASHES_MAX} are allowed`;
      const details = `prefix_block_hashes: ${text}`;
      throw new CallFailed('Admit', { code: status.INVALID_ARGUMENT, details });
    }
    const response = await this.call('Admit', { requestId: randomUUID(), ...request }, options);
    if (response.outcome !== 'OUTCOME_GRANTED') throw new Refused(response);
    return new Admission(this, response);
  }

  /**
   * Run `work(admission)` as soon as the request is granted, and end the lease whatever happens:
   * as completed where it returns, as cancelled where it throws.
   */
  async withAdmission(request, work, options) {
    const admission = await this.admit(request, options);
    let outcome = 'OUTCOME_CANCELLED';
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

  /** A snapshot of pools, flows and counters: StatsResponse in camel case. */
  stats({ tenants = [], flowLimit = 0 } = {}) {
    return this.call('Stats', { tenants, flowLimit });
  }

  /**
   * Ask for a request's place in the queue, why it waits, or why it was refused: `requests` in
   * camel case, none if the scheduler does not know it; `message` says it for a person.
   */
  async explain(requestId, { tenant = '', ...options } = {}) {
    const asked = { requestId, tenant };
    const { requests } = await this.#call('ExplainService', 'Explain', asked, options);
    return requests;
  }

  /** Make any unary call of SchedulerService. */
  call(method, request, options) {
    return this.#call('SchedulerService', method, request, options);
  }

  close() {
    for (const { scheduling } of this.#clients.values()) scheduling.close();
  }

  // The raw client of a service at a target, made at its first use.
  #client(service, target) {
    const made = this.#clients.get(target) ?? this.#connect(target);
    this.#clients.set(target, made);
    if (service === 'SchedulerService') return made.scheduling;
    made.explaining ??= new (serviceClient({ service }))('', credentials.createInsecure(), {
      channelOverride: made.scheduling.getChannel(),
    });
    return made.explaining;
  }

  #connect(target) {
    const retries = this.#targets.several
      ? {}
      : { 'grpc.service_config': JSON.stringify(SERVICE_CONFIG) };
    const scheduling = new (serviceClient())(target, this.#credentials, {
      'grpc.initial_reconnect_backoff_ms': 100,
      'grpc.max_reconnect_backoff_ms': 1_000,
      // Else a name that got another address is not looked up again for 30 s.
      'grpc.dns_min_time_between_resolutions_ms': 1_000,
      ...retries,
      // grpc-js obeys grpc_proxy, https_proxy and http_proxy even for loopback addresses.
      ...(isLocal(target) ? { 'grpc.enable_http_proxy': 0 } : {}),
      ...this.#channel,
    });
    return { scheduling };
  }

  // Call one target; with several, one after the other, inside the deadline.
  async #call(service, method, request, { signal, deadlineMs } = {}) {
    const endsMs = deadlineMs ? Date.now() + deadlineMs : Infinity;
    let awaySinceMs = performance.now();
    for (;;) {
      const target = this.#targets.current;
      const beganMs = performance.now();
      try {
        const response = await this.#attempt(service, target, method, request, signal, endsMs);
        this.#check(target, method, response);
        return response;
      } catch (error) {
        const elsewhere = error instanceof CallFailed && !OF_CALLER.includes(error.code);
        if (!this.#targets.several || !elsewhere) throw error;
        const nowMs = performance.now();
        // A call that was watched is cancelled by this client alone.
        const isSilent = [status.DEADLINE_EXCEEDED, status.CANCELLED].includes(error.code);
        const silentMs = isSilent ? this.#silentAfterMs : 0;
        this.#targets.moveOn(target, error.leader, { nowMs, silentMs });
        // It was held by a scheduler that answered until then.
        if (nowMs - beganMs > this.#failoverWaitMs) awaySinceMs = nowMs;
        const pauseMs = this.#targets.pauseMsMax(nowMs) * Math.random();
        const isLate = nowMs - awaySinceMs > this.#failoverWaitMs;
        if (isLate || Date.now() + pauseMs >= endsMs) throw error;
        await sleep(pauseMs);
      }
    }
  }

  // Drop an answer of a scheduler that leads no more.
  #check(target, method, response) {
    if (FENCED.has(method) && !this.#fence.obeys(response.leadership)) {
      const term = response.leadership?.term ?? 0;
      const details = `${target} answers under term ${term}, but ${this.#fence.term} is known`;
      throw new CallFailed(method, { code: status.UNAVAILABLE, details });
    }
    this.#targets.answered();
  }

  #attempt(service, target, method, request, signal, endsMs) {
    const isWatched = this.#targets.several && this.#silentAfterMs > 0;
    // An Admit may be held for long, so it is probed. Others are answered at once.
    const isHeld = method === 'Admit';
    const limitMs = isWatched && !isHeld ? Date.now() + this.#silentAfterMs : Infinity;
    const deadline = Math.min(endsMs, limitMs);
    const options = deadline < Infinity ? { deadline } : {};
    const metadata = new Metadata();
    if (this.#token) metadata.set('authorization', `Bearer ${this.#token}`);
    if (this.#fence.term) metadata.set('schedsvc-term', String(this.#fence.term));
    return new Promise((resolve, reject) => {
      signal?.throwIfAborted();
      const client = this.#client(service, target);
      let watch;
      const call = client[method](request, metadata, options, (error, response) => {
        clearInterval(watch);
        signal?.removeEventListener('abort', cancel);
        if (error) reject(signal?.aborted ? signal.reason : new CallFailed(method, error));
        else resolve(response);
      });
      const cancel = () => call.cancel();
      signal?.addEventListener('abort', cancel, { once: true });
      if (isWatched && isHeld) {
        watch = setInterval(async () => {
          if (await this.#isSilent(target)) cancel();
        }, this.#silentAfterMs / PROBES);
      }
    });
  }

  // Whether the scheduler that holds calls of this client answers nothing any more. Each probe has
  // its own deadline, so a process that stood still loses one probe at most.
  async #isSilent(target) {
    const stepMs = this.#silentAfterMs / PROBES;
    if (this.#probe.target !== target) this.#probe = { target, missed: 0, atMs: -Infinity };
    const probe = this.#probe;
    if (performance.now() - probe.atMs >= 0.9 * stepMs) {
      probe.atMs = performance.now();
      const service = 'SchedulerService';
      const nothing = { leases: [] };
      try {
        const untilMs = Date.now() + stepMs;
        const found = await this.#attempt(service, target, 'Progress', nothing, undefined, untilMs);
        // An answer under a term that is over is none.
        const isObeyed = this.#fence.obeys(found.leadership);
        probe.missed = isObeyed ? 0 : probe.missed + 1;
      } catch (error) {
        probe.missed = error.code === status.DEADLINE_EXCEEDED ? probe.missed + 1 : 0;
      }
    }
    return probe.missed >= PROBES;
  }
}

/** A granted request. It is renewed in the background until it ends. */
export class Admission {
  #scheduler;
  #lease;
  #ttlMs;
  #totals = {};
  #timer;
  #lost = new AbortController();
  #books;

  constructor(scheduler, { grant, queueDurationUs }) {
    this.#scheduler = scheduler;
    this.#lease = { leaseId: grant.leaseId, poolEpoch: grant.poolEpoch };
    this.leaseId = grant.leaseId;
    this.pool = grant.pool;
    this.reservedTokens = Number(grant.reservedTokens);
    /** Lower runs first. */
    this.enginePriority = grant.enginePriority;
    this.queueDurationMs = Number(queueDurationUs) / 1_000;
    this.#ttlMs = Number(grant.ttlMs);
    // Two renewals may be lost before the lease is.
    this.#timer = setInterval(() => this.#renew(), this.#ttlMs / 3);
    this.#timer.unref();
  }

  /** Aborts when the scheduler no longer knows the lease as live: stop the engine's work then. */
  get signal() {
    return this.#lost.signal;
  }

  /**
   * Note running totals: `inputTokens`, `cachedInputTokens`, `outputTokens`. They travel with the
   * next renewal and with the end, so it costs nothing to call it for every token.
   */
  report(totals) {
    Object.assign(this.#totals, totals);
  }

  /** End the lease as done. Returns what was charged. */
  complete(totals) {
    return this.end('OUTCOME_COMPLETED', totals);
  }

  /** End the lease before it was done. Returns what was charged. */
  cancel(totals) {
    return this.end('OUTCOME_CANCELLED', totals);
  }

  /**
   * End the lease, once: a second call returns the charge of the first. If the scheduler is away,
   * the client retries until the lease has surely expired.
   */
  end(outcome, totals) {
    this.#books ??= this.#end(outcome, totals);
    return this.#books;
  }

  /** `await using` cancels a lease that was not completed. */
  async [Symbol.asyncDispose]() {
    await this.cancel();
  }

  async #end(outcome, totals) {
    clearInterval(this.#timer);
    this.report(totals);
    const request = { ...this.#lease, outcome, ...this.#totals };
    const books = await this.#deliver(request);
    return {
      outcome: books.outcome,
      inputTokens: Number(books.inputTokens),
      cachedInputTokens: Number(books.cachedInputTokens),
      outputTokens: Number(books.outputTokens),
    };
  }

  async #deliver(request) {
    const expiredMs = Date.now() + this.#ttlMs + LEASE_GRACE_MS;
    let ceilingMs = END_BACKOFF_MIN_MS;
    for (;;) {
      try {
        return await this.#scheduler.call('Complete', request, { deadlineMs: END_DEADLINE_MS });
      } catch (error) {
        if (!PASSING.includes(error.code) || Date.now() > expiredMs) throw error;
      }
      await sleep(ceilingMs * (0.5 + 0.5 * Math.random()));
      ceilingMs = Math.min(2 * ceilingMs, END_BACKOFF_MAX_MS);
    }
  }

  async #renew() {
    const request = { leases: [{ ...this.#lease, ...this.#totals }] };
    try {
      const { leases } = await this.#scheduler.call('Progress', request);
      const [{ state }] = leases;
      if (state !== 'LEASE_STATE_LIVE' && !this.#books) {
        this.#lost.abort(new Error(`lease ${this.leaseId} is ${state}`));
      }
    } catch {
      // The next renewal may pass; what counts is the lease's TTL, and that is the scheduler's.
    }
  }
}

// The right of one request to run on an engine: a lease that is renewed until it ends.

import { setTimeout as sleep } from 'node:timers/promises';
import { status } from '@grpc/grpc-js';
import type { AdmitResponse__Output } from './build/schedsvc/v1/AdmitResponse';
import type { LeaseProgress } from './build/schedsvc/v1/LeaseProgress';
import type { Outcome } from './build/schedsvc/v1/Outcome';
import { type Answer, type Asked, checkMessage, checkNames, checkObject, hold } from './contract';
import { CallFailed, type Limit, limitsOf } from './errors';
import type { Scheduler } from './index';

// These bound one attempt to end a lease.
export const END_DEADLINE_MS = 5_000;
const END_BACKOFF_MIN_MS = 50;
const END_BACKOFF_MAX_MS = 2_000;
// How long the scheduler keeps an expired lease: past it a Complete is no longer repeated.
const LEASE_GRACE_MS = 20_000;
const PASSING = [status.UNAVAILABLE, status.DEADLINE_EXCEEDED];
export const NOTHING_USED = { inputTokens: 0, cachedInputTokens: 0, outputTokens: 0 };

/** Running totals of a request, never differences. */
export type Totals = Pick<LeaseProgress, 'inputTokens' | 'cachedInputTokens' | 'outputTokens'>;

/** What was charged. */
export interface Books {
  outcome: Outcome;
  inputTokens: number;
  cachedInputTokens: number;
  outputTokens: number;
}

// A scheduler refuses a whole report whose total is beyond the limits of the contract, and the
// lease of a Complete would live until its TTL.
const TOKENS_MAX = 2 ** 27;
const within = (total: Totals[keyof Totals]) => Math.min(Math.max(Number(total), 0), TOKENS_MAX);

const END_OUTCOMES = ['OUTCOME_COMPLETED', 'OUTCOME_CANCELLED'] as const;
export type EndOutcome = (typeof END_OUTCOMES)[number];

/** A granted request. It is renewed in the background until it ends. */
export class Admission {
  /** By which an operator finds the request. */
  readonly requestId: string;
  readonly leaseId: string;
  readonly pool: string;
  readonly reservedTokens: number;
  /** Lower runs first. */
  readonly enginePriority: number;
  readonly queueDurationMs: number;
  /** The quotas of the tenant. */
  readonly limits: Limit[];
  #scheduler;
  #lease;
  #ttlMs;
  #totals: Totals = {};
  #timer;
  #lost = new AbortController();
  #books: Promise<Books> | undefined;
  #onEnd;

  /** @internal */
  constructor(
    scheduler: Scheduler,
    requestId: string,
    { grant, queueDurationUs }: AdmitResponse__Output,
    onEnd: () => void,
  ) {
    const { leaseId, pool, poolEpoch, reservedTokens, enginePriority, ttlMs } = grant!;
    this.#scheduler = scheduler;
    this.#onEnd = onEnd;
    this.#lease = { leaseId, poolEpoch };
    this.requestId = requestId;
    this.leaseId = leaseId;
    this.pool = pool;
    this.reservedTokens = Number(reservedTokens);
    this.enginePriority = enginePriority;
    this.queueDurationMs = Number(queueDurationUs) / 1_000;
    this.limits = limitsOf(grant?.quota);
    this.#ttlMs = Number(ttlMs);
    // Two renewals may be lost before the lease is.
    this.#timer = setInterval(() => this.#renew(), this.#ttlMs / 3);
    this.#timer.unref();
  }

  /** Aborts when the scheduler no longer knows the lease as live: stop the engine's work then. */
  get signal(): AbortSignal {
    return this.#lost.signal;
  }

  /**
   * Note running totals. They travel with the next renewal and with the end, so it costs nothing
   * to call it for every token.
   */
  report(totals: Totals = {}): void {
    checkObject('totals', totals);
    checkNames('total', totals, Object.keys(NOTHING_USED));
    checkMessage('LeaseProgress', totals, 'totals');
    for (const [name, total] of Object.entries(totals)) {
      if (total === undefined || total === null) continue;
      this.#totals[name as keyof Totals] = within(total);
    }
  }

  /** End the lease as done. Returns what was charged. */
  complete(totals?: Totals): Promise<Books> {
    return this.end('OUTCOME_COMPLETED', totals);
  }

  /** End the lease before it was done. Returns what was charged. */
  cancel(totals?: Totals): Promise<Books> {
    return this.end('OUTCOME_CANCELLED', totals);
  }

  /**
   * End the lease, once: a second call returns the charge of the first. If the scheduler is away,
   * the client retries until the lease has surely expired.
   */
  end(outcome: EndOutcome, totals?: Totals): Promise<Books> {
    hold(END_OUTCOMES.includes(outcome), 'outcome', outcome, `one of ${END_OUTCOMES.join(', ')}`);
    if (!this.#books) {
      this.report(totals);
      clearInterval(this.#timer);
      this.#books = this.#end(outcome).finally(this.#onEnd);
    }
    return this.#books;
  }

  /** `await using` cancels a lease that was not completed. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.cancel();
  }

  async #end(outcome: EndOutcome): Promise<Books> {
    const books = await this.#deliver({ ...this.#lease, outcome, ...this.#totals });
    return {
      outcome: books.outcome,
      inputTokens: Number(books.inputTokens),
      cachedInputTokens: Number(books.cachedInputTokens),
      outputTokens: Number(books.outputTokens),
    };
  }

  async #deliver(request: Asked<'Complete'>): Promise<Answer<'Complete'>> {
    const expiredMs = Date.now() + this.#ttlMs + LEASE_GRACE_MS;
    let ceilingMs = END_BACKOFF_MIN_MS;
    for (;;) {
      try {
        return await this.#scheduler.call('Complete', request, { deadlineMs: END_DEADLINE_MS });
      } catch (error) {
        const isPassing = error instanceof CallFailed && PASSING.includes(error.code);
        if (!isPassing || Date.now() > expiredMs) throw error;
      }
      await sleep(ceilingMs * (0.5 + 0.5 * Math.random()));
      ceilingMs = Math.min(2 * ceilingMs, END_BACKOFF_MAX_MS);
    }
  }

  async #renew(): Promise<void> {
    const request = { leases: [{ ...this.#lease, ...this.#totals }] };
    try {
      const { leases } = await this.#scheduler.call('Progress', request);
      const state = leases[0]?.state;
      // A state of a later version is no reason to stop.
      if (/^LEASE_STATE_(UNKNOWN|VOID|ENDED)$/.test(`${state}`) && !this.#books) {
        this.#lost.abort(new Error(`lease ${this.leaseId} is ${state}`));
      }
    } catch {
      // The next renewal may pass; what counts is the lease's TTL, and that is the scheduler's.
    }
  }
}

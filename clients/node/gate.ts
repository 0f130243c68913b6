// Middlewares for a server of your own: each request waits for its turn before its handler runs.

import type { IncomingMessage, ServerResponse } from 'node:http';
import { status } from '@grpc/grpc-js';
import type { Admission, AdmitRequest, Outcome, Scheduler } from './index';
import { checkObject, hold } from './contract';
import { CallFailed, type Limit, Refused } from './errors';

/** Gives the size of a request, and its tenant; undefined: it passes without a turn. */
export type SizeOf<R> = (request: R) => Sized | Promise<Sized>;
type Sized = AdmitRequest | undefined;

/** The turn of a request whose handler runs. */
export interface Turn {
  /** Report its tokens here; the middleware ends it with the answer. */
  admission: Admission;
  /** Aborts when the client leaves, and when the lease is lost: stop the engine's work then. */
  signal: AbortSignal;
}

const turns = new WeakMap<IncomingMessage, Turn>();

/** Give the turn of a gated request, of Express or of Fastify. */
export function turnOf(request: IncomingMessage | { raw: IncomingMessage }): Turn {
  checkObject('request', request);
  const turn = turns.get('raw' in request ? request.raw : request);
  if (!turn) throw new Error('the request was not gated');
  return turn;
}

/** Gate what follows in Express: `app.post(path, expressGate(scheduler, sizeOf), handler)`. */
export function expressGate<R extends IncomingMessage>(scheduler: Scheduler, sizeOf: SizeOf<R>) {
  checkGate(scheduler, sizeOf);
  return async (
    request: R, response: ServerResponse, next: (error?: unknown) => void,
  ): Promise<void> => {
    try {
      const answer = await wait(scheduler, () => sizeOf(request), request, response);
      if (answer === 'runs') next();
      else if (answer !== 'left') {
        response.writeHead(answer.status, answer.headers).end(answer.body);
      }
    } catch (error) {
      next(error);
    }
  };
}

interface FastifyReply {
  raw: ServerResponse;
  hijack(): unknown;
  code(status: number): { headers(headers: object): { send(body: string): unknown } };
}

/** Gate a route of Fastify: `{ preHandler: fastifyGate(scheduler, sizeOf) }`. */
export function fastifyGate<R extends { raw: IncomingMessage }>(
  scheduler: Scheduler, sizeOf: SizeOf<R>,
) {
  checkGate(scheduler, sizeOf);
  return async (request: NoInfer<R>, reply: FastifyReply): Promise<unknown> => {
    const answer = await wait(scheduler, () => sizeOf(request), request.raw, reply.raw);
    if (answer === 'runs') return undefined;
    if (answer === 'left') reply.hijack();
    else reply.code(answer.status).headers(answer.headers).send(answer.body);
    return reply;
  };
}

function checkGate(scheduler: Scheduler, sizeOf: unknown): void {
  hold(typeof scheduler?.admit === 'function', 'scheduler', scheduler, 'a Scheduler');
  hold(typeof sizeOf === 'function', 'sizeOf', sizeOf, 'a function');
}

interface Answer {
  status: number;
  headers: Headers;
  body: string;
}

// Wait for the turn of a request. Its lease ends with the answer, however that ends.
async function wait(
  scheduler: Scheduler, sizeOf: () => Sized | Promise<Sized>,
  request: IncomingMessage, response: ServerResponse,
): Promise<'runs' | 'left' | Answer> {
  const left = new AbortController();
  response.once('close', () => left.abort(new Error('the client left')));
  const sized = await sizeOf();
  if (sized === undefined) return 'runs';
  let admission: Admission;
  try {
    admission = await scheduler.admit(sized, { signal: left.signal });
  } catch (error) {
    if (left.signal.aborted) return 'left';
    return refused(sized, error);
  }
  const end = () => {
    const isDone = response.writableFinished && response.statusCode < 400;
    admission.end(isDone ? 'OUTCOME_COMPLETED' : 'OUTCOME_CANCELLED').catch((error) => {
      process.emitWarning(`lease ${admission.leaseId} was not ended, it will expire: ${error}`);
    });
  };
  response.once('close', end);
  for (const [name, value] of Object.entries(described(sized, admission))) {
    response.setHeader(name, value);
  }
  turns.set(request, { admission, signal: AbortSignal.any([left.signal, admission.signal]) });
  return 'runs';
}

type Face = [status: number, type: string, code: string];
const SLOW_DOWN: Face = [429, 'rate_limit_error', 'slow_down'];
const RATE_LIMIT: Face = [429, 'rate_limit_error', 'rate_limit_exceeded'];
const TOO_LONG: Face = [400, 'invalid_request_error', 'context_length_exceeded'];
const OVERLOADED: Face = [503, 'service_unavailable_error', 'server_is_overloaded'];
// As the gate of schedsvc-vllm answers; an outcome that is missing here is OVERLOADED.
const FACES: { [O in Outcome]?: Face } = {
  OUTCOME_REJECTED_FLOW_QUEUE_FULL: SLOW_DOWN,
  OUTCOME_REJECTED_TOO_LARGE: TOO_LONG,
  OUTCOME_EVICTED_TOO_LARGE: TOO_LONG,
  OUTCOME_REJECTED_UNKNOWN_TENANT: [403, 'permission_error', 'unknown_tenant'],
  OUTCOME_REJECTED_QUOTA: RATE_LIMIT,
  OUTCOME_REJECTED_QUOTA_SIZE: [429, 'rate_limit_error', 'request_too_large'],
  OUTCOME_REJECTED_DEADLINE: RATE_LIMIT,
  OUTCOME_EVICTED_TTL: RATE_LIMIT,
  OUTCOME_EVICTED_DEADLINE: RATE_LIMIT,
};
const AWAY = [status.UNAVAILABLE, status.DEADLINE_EXCEEDED, status.RESOURCE_EXHAUSTED];
const AWAY_RETRY_MS = 1_000;

// The limits that x-ratelimit headers report. Places in a queue and tokens of the pool would show
// how busy the server is with other tenants.
const QUOTAS: { [K in Limit['kind']]?: string } = {
  LIMIT_KIND_REQUESTS_PER_MINUTE: 'requests',
  LIMIT_KIND_TOKENS_PER_MINUTE: 'tokens',
  LIMIT_KIND_INPUT_TOKENS_PER_MINUTE: 'input-tokens',
  LIMIT_KIND_OUTPUT_TOKENS_PER_MINUTE: 'output-tokens',
  LIMIT_KIND_CONCURRENT_REQUESTS: 'concurrent-requests',
  LIMIT_KIND_TOKENS_PER_DAY: 'tokens-day',
  LIMIT_KIND_TOKENS_PER_MONTH: 'tokens-month',
};

type Headers = Record<string, string>;
type Decided = Pick<Admission, 'requestId' | 'queueDurationMs' | 'limits'>;

/**
 * The headers with what the scheduler said of a request. A caller without a name shares the limits
 * of unknown tenants, which are not its own to see.
 */
function described(asked: AdmitRequest, { requestId, queueDurationMs, limits }: Decided): Headers {
  const headers: Headers = {
    'x-schedsvc-request-id': requestId,
    'x-schedsvc-queue-duration-ms': queueDurationMs.toFixed(3),
  };
  const isNamed = asked.tenant || asked.apiKeySha256?.length;
  for (const { kind, limit, remaining, resetMs } of isNamed ? limits : []) {
    const name = QUOTAS[kind];
    if (!name) continue;
    headers[`x-ratelimit-limit-${name}`] = `${limit}`;
    headers[`x-ratelimit-remaining-${name}`] = `${remaining}`;
    headers[`x-ratelimit-reset-${name}`] = durationText(resetMs);
  }
  return headers;
}

// A time as OpenAI writes it: 0s, 120ms, 1s, 6m0s, 1h0m2.5s.
function durationText(ms: number): string {
  if (ms > 0 && ms < 1_000) return `${ms}ms`;
  const minutes = Math.floor(ms / 60_000);
  const seconds = `${(ms % 60_000) / 1_000}s`;
  if (minutes < 60) return minutes ? `${minutes}m${seconds}` : seconds;
  return `${Math.floor(minutes / 60)}h${minutes % 60}m${seconds}`;
}

/** Answer a request that gets no turn; throw what is a mistake of the server itself. */
function refused(asked: AdmitRequest, error: unknown): Answer {
  if (error instanceof Refused) {
    const { outcome, message, retryAfterMs } = error;
    const reason = outcome.replace('OUTCOME_', '').toLowerCase();
    const told = { 'x-schedsvc-dropped-reason': reason, ...described(asked, error) };
    return answer(FACES[outcome] ?? OVERLOADED, message, retryAfterMs, told);
  }
  if (!(error instanceof CallFailed)) throw error;
  if (AWAY.includes(error.code)) {
    const told = { 'x-schedsvc-dropped-reason': 'scheduler_unreachable' };
    return answer(OVERLOADED, 'the scheduler is away', error.retryAfterMs || AWAY_RETRY_MS, told);
  }
  if (error.code !== status.INVALID_ARGUMENT) throw error;
  return answer([400, 'invalid_request_error', 'invalid_size'], error.message, 0);
}

// Without a time for a retry, a retry cannot help.
function answer(
  [status, type, code]: Face, message: string, retryAfterMs: number, told: Headers = {},
): Answer {
  const ms = Math.ceil(retryAfterMs);
  const retry: Headers = ms > 0
    ? { 'retry-after': `${Math.ceil(ms / 1_000)}`, 'retry-after-ms': `${ms}` }
    : { 'x-should-retry': 'false' };
  const body = JSON.stringify({ error: { message, type, code, param: null } });
  return { status, headers: { 'content-type': 'application/json', ...told, ...retry }, body };
}

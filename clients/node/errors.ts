// Errors that a caller gets instead of an admission: a refusal, or a call that failed.

import { Metadata, status } from '@grpc/grpc-js';
import protobuf from 'protobufjs';
import type { AdmitResponse__Output } from './build/schedsvc/v1/AdmitResponse';
import type { LimitKind__Output } from './build/schedsvc/v1/LimitKind';
import type { Outcome__Output } from './build/schedsvc/v1/Outcome';
import type { QuotaSnapshot__Output } from './build/schedsvc/v1/QuotaSnapshot';

/** One limit of a tenant, e.g. of kind 'LIMIT_KIND_REQUESTS_PER_MINUTE'. */
export interface Limit {
  kind: LimitKind__Output;
  limit: number;
  remaining: number;
  resetMs: number;
}

export function limitsOf(quota?: QuotaSnapshot__Output | null): Limit[] {
  return (quota?.limits ?? []).map(({ kind, limit, remaining, resetMs }) => ({
    kind, limit: Number(limit), remaining: Number(remaining), resetMs: Number(resetMs),
  }));
}

/** The scheduler's verdict is that the request does not run. */
export class Refused extends Error {
  override name = 'Refused';
  /** By which an operator finds the request. */
  readonly requestId: string;
  /** e.g. 'OUTCOME_REJECTED_QUOTA'; 'OUTCOME_UNSPECIFIED' if a later version gave the reason. */
  readonly outcome: Outcome__Output;
  /** When to retry; 0: a retry cannot help. */
  readonly retryAfterMs: number;
  /** Requests that were ahead of it in the tenant's queue. */
  readonly queuePosition: number;
  /** The limits of the tenant. */
  readonly limits: Limit[];
  readonly queueDurationMs: number;

  constructor(requestId: string, response: AdmitResponse__Output) {
    const { refusal, queueDurationUs } = response;
    // One of a later version is a number.
    const isKnown = typeof response.outcome === 'string';
    const outcome = isKnown ? response.outcome : 'OUTCOME_UNSPECIFIED';
    super(refusal?.message || outcome);
    this.requestId = requestId;
    this.outcome = outcome;
    this.retryAfterMs = Number(refusal?.retryAfterMs ?? 0);
    this.queuePosition = Number(refusal?.queuePosition ?? 0);
    this.limits = limitsOf(refusal?.quota);
    this.queueDurationMs = Number(queueDurationUs) / 1_000;
  }
}

interface Failure {
  code: status;
  details: string;
  metadata?: Metadata;
}

/** A call failed. `code` is gRPC's number, `fields` names what was wrong in the request. */
export class CallFailed extends Error {
  override name = 'CallFailed';
  readonly code: status;
  readonly fields: { field: string; description: string }[];
  readonly retryAfterMs: number | undefined;
  /** The target of the leader, if a scheduler that does not lead named it. */
  readonly leader: string | undefined;

  constructor(method: string, error: Failure) {
    const { fields, retryAfterMs } = errorDetails(error);
    const named = fields.map(({ field, description }) => `${field}: ${description}`).join('; ');
    super(`${method}: ${named || error.details}`, { cause: error });
    this.code = error.code;
    this.fields = fields;
    this.retryAfterMs = retryAfterMs;
    this.leader = error.metadata?.get('schedsvc-leader')[0]?.toString();
  }
}

// The parts of google/rpc/status.proto and error_details.proto that the contract uses.
const details = protobuf.parse(`
  syntax = "proto3";
  message Any { string type_url = 1; bytes value = 2; }
  message Status { int32 code = 1; string message = 2; repeated Any details = 3; }
  message BadRequest {
    message FieldViolation { string field = 1; string description = 2; }
    repeated FieldViolation field_violations = 1;
  }
  message Duration { int64 seconds = 1; int32 nanos = 2; }
  message RetryInfo { Duration retry_delay = 1; }
`).root;

function decode(type: string, bytes: Uint8Array): any {
  return details.lookupType(type).decode(bytes);
}

/**
 * Read the details of a gRPC error: `fields`, those that were wrong, and `retryAfterMs`, undefined
 * if there is no RetryInfo.
 */
export function errorDetails(error: { metadata?: Metadata }) {
  const fields: { field: string; description: string }[] = [];
  let retryAfterMs: number | undefined;
  const [found] = error.metadata?.get('grpc-status-details-bin') ?? [];
  for (const { typeUrl, value } of found ? decode('Status', found as Buffer).details : []) {
    const name = typeUrl.slice(typeUrl.lastIndexOf('/') + 1);
    if (name === 'google.rpc.BadRequest') {
      fields.push(...decode('BadRequest', value).fieldViolations);
    } else if (name === 'google.rpc.RetryInfo') {
      const { retryDelay } = decode('RetryInfo', value);
      retryAfterMs = Number(retryDelay?.seconds ?? 0) * 1_000 + (retryDelay?.nanos ?? 0) / 1e6;
    }
  }
  return { fields, retryAfterMs };
}

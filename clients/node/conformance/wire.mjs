// Helpers that unary calls and streams share.

import { status } from '@grpc/grpc-js';
import { errorDetails } from '../contract.mjs';

export const PATIENCE_MS = 20_000;

export const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** The parts of a failed call that a script can expect: code, message, fields, whether to retry. */
export function errorOutcome(error) {
  const { fields, retryAfterMs } = errorDetails(error);
  return {
    error: {
      code: status[error.code] ?? `${error}`,
      message: error.details,
      field: fields.map(({ field }) => field),
      retry: retryAfterMs !== undefined,
    },
  };
}

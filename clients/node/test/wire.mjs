// Helpers that unary calls and streams share.

import { readFileSync } from 'node:fs';
import { credentials, status } from '@grpc/grpc-js';
import { errorDetails } from '../dist/errors.js';

export const PATIENCE_MS = 20_000;

const { SCHEDSVC_TLS_CA_FILE: authority } = process.env;
export const channelCredentials = authority
  ? credentials.createSsl(readFileSync(authority))
  : credentials.createInsecure();

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

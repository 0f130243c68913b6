// The contract as gRPC knows it: the service of the .proto file, and the details of an error.

import { fileURLToPath } from 'node:url';
import { loadPackageDefinition } from '@grpc/grpc-js';
import { loadSync } from '@grpc/proto-loader';
import protobuf from 'protobufjs';

const FOLDER = fileURLToPath(new URL('../../proto', import.meta.url));
const PROTO = {
  SchedulerService: 'schedsvc/v1/scheduler.proto',
  ExplainService: 'schedsvc/v1/explain.proto',
};

// 64-bit numbers stay text, because a lease id does not fit into a JavaScript number.
const OPTIONS = { longs: String, enums: String, bytes: String, defaults: true };

/**
 * The class of raw clients of a service. With `keepCase`, fields are spelled as in the .proto file,
 * else in camel case.
 */
export function serviceClient({
  keepCase = false,
  folder = FOLDER,
  service = 'SchedulerService',
} = {}) {
  const definition = loadSync(PROTO[service], { ...OPTIONS, keepCase, includeDirs: [folder] });
  return loadPackageDefinition(definition).schedsvc.v1[service];
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

/**
 * Read the details of a gRPC error: `fields`, those that were wrong, each with `field` and
 * `description`, and `retryAfterMs`, undefined if there is no RetryInfo.
 */
export function errorDetails(error) {
  const found = { fields: [], retryAfterMs: undefined };
  const [status] = error.metadata?.get('grpc-status-details-bin') ?? [];
  if (!status) return found;
  for (const { typeUrl, value } of details.lookupType('Status').decode(status).details) {
    const name = typeUrl.slice(typeUrl.lastIndexOf('/') + 1);
    if (name === 'google.rpc.BadRequest') {
      found.fields.push(...details.lookupType('BadRequest').decode(value).fieldViolations);
    } else if (name === 'google.rpc.RetryInfo') {
      const { retryDelay } = details.lookupType('RetryInfo').decode(value);
      const seconds = Number(retryDelay?.seconds ?? 0);
      found.retryAfterMs = seconds * 1_000 + (retryDelay?.nanos ?? 0) / 1e6;
    }
  }
  return found;
}

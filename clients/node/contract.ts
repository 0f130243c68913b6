// The contract as gRPC knows it: the methods of the .proto files, and the fields of their messages.

import { join } from 'node:path';
import { loadSync, type MethodDefinition } from '@grpc/proto-loader';
import type { ExplainServiceDefinition } from './build/schedsvc/v1/ExplainService';
import type { SchedulerServiceDefinition } from './build/schedsvc/v1/SchedulerService';

const FOLDER = join(__dirname, 'proto');
const FILES = ['schedsvc/v1/scheduler.proto', 'schedsvc/v1/explain.proto'];
// 64-bit numbers stay text, because a lease id does not fit into a JavaScript number.
const OPTIONS = { longs: String, enums: String, bytes: String, defaults: true };

/**
 * Load the services and messages by their full names. With `keepCase`, fields are spelled as in the
 * .proto files, else in camel case.
 */
export function load({ keepCase = false } = {}) {
  return loadSync(FILES, { ...OPTIONS, keepCase, includeDirs: [FOLDER] });
}

const loaded = load();

const scheduling = loaded['schedsvc.v1.SchedulerService'] as object as SchedulerServiceDefinition;
const explaining = loaded['schedsvc.v1.ExplainService'] as object as ExplainServiceDefinition;
export const SERVICES = [scheduling, explaining];
const { Session, ...unary } = scheduling;
export const METHODS: Definitions = { ...unary, ...explaining };

type Definitions = Pick<SchedulerServiceDefinition, 'Admit' | 'Progress' | 'Complete' | 'Stats'> &
  Pick<ExplainServiceDefinition, 'Explain' | 'ListRequestIds'>;
/** The names of the unary methods. */
export type Method = keyof Definitions;
/** What a method is asked with, and what it answers. */
export type Asked<M extends Method> =
  Definitions[M] extends MethodDefinition<infer Q, any, any, any> ? Q : never;
export type Answer<M extends Method> =
  Definitions[M] extends MethodDefinition<any, any, any, infer A> ? A : never;

type Descriptor = { name: string; field: { name: string; typeName: string }[] };

/** Throw a TypeError that names a field which the request message of a method does not have. */
export function checkRequest<M extends Method>(method: M, request: Asked<M>): void {
  checkNames('method', { [method]: request }, Object.keys(METHODS));
  check(METHODS[method].requestType.type as Descriptor, request as object);
}

function check({ field }: Descriptor, value: object): void {
  checkNames('field', value, field.map(({ name }) => name));
  for (const { name, typeName } of field) {
    const type = typeName && (loaded[`schedsvc.v1.${typeName}`] as { type: Descriptor }).type;
    const below: unknown = (value as Record<string, unknown>)[name];
    for (const one of type && 'field' in type ? [below].flat() : []) {
      if (one !== null && typeof one === 'object') check(type as Descriptor, one);
    }
  }
}

/** Throw a TypeError that names a key which is not known, and the one that was meant. */
export function checkNames(kind: string, given: object, known: readonly string[]): void {
  const wrong = Object.keys(given).find((name) => !known.includes(name));
  if (wrong === undefined) return;
  const meant = known.find((name) => plain(name) === plain(wrong));
  const hint = meant ? `did you mean ${meant}` : `known are ${known.join(', ')}`;
  throw new TypeError(`unknown ${kind} ${wrong}; ${hint}`);
}

// Without what people spell in several ways: case, underscores, the plural.
const plain = (name: string) => name.replace(/_/g, '').replace(/s$/, '').toLowerCase();

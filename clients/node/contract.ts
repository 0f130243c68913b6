// The contract as gRPC knows it: the methods of the .proto files, and the fields of their messages.

import { join } from 'node:path';
import { inspect } from 'node:util';
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

type Field = { name: string; label: string; type: string; typeName: string };
type Descriptor = { field: Field[] };
type Enumeration = { value: { name: string }[] };
const definitions = loaded as unknown as Record<string, { type: Descriptor & Enumeration }>;

/** Throw a TypeError if a method is not known, or does not take this request. */
export function checkRequest<M extends Method>(method: M, request: Asked<M>): void {
  checkNames('method', { [method]: request }, Object.keys(METHODS));
  checkMessage((METHODS[method].requestType.type as { name: string }).name, request);
}

/**
 * Throw a TypeError that names a field which a message does not have, or whose value does not fit:
 * the serializer would send 0 for NaN and for a name that it does not know. `at` is how errors name
 * the message.
 */
export function checkMessage(message: string, given: unknown, at = message): void {
  checkObject(at, given);
  const { field: fields } = definitions[`schedsvc.v1.${message}`]!.type;
  checkNames('field', given, fields.map(({ name }) => name));
  for (const field of fields) {
    const value = (given as Record<string, unknown>)[field.name];
    const place = `${at}.${field.name}`;
    if (value === undefined || value === null) continue;
    if (field.label !== 'LABEL_REPEATED') checkValue(field, value, place);
    else if (!Array.isArray(value)) throw misfit(place, value, 'a list');
    else for (const [index, one] of value.entries()) checkValue(field, one, `${place}[${index}]`);
  }
}

function checkValue(field: Field, value: unknown, at: string): void {
  const { type, typeName } = field;
  if (type === 'TYPE_MESSAGE') return checkMessage(typeName, value, at);
  if (type === 'TYPE_STRING') return hold(typeof value === 'string', at, value, 'text');
  if (type === 'TYPE_BOOL') return hold(typeof value === 'boolean', at, value, 'true or false');
  if (type === 'TYPE_BYTES') {
    const isBase64 = typeof value === 'string' && /^[\w+/-]*={0,2}$/.test(value);
    return hold(isBase64 || value instanceof Uint8Array, at, value, 'bytes, or text in base64');
  }
  if (type === 'TYPE_ENUM') {
    const names = definitions[`schedsvc.v1.${typeName}`]!.type.value.map(({ name }) => name);
    const isKnown = names.includes(value as string) || Number.isInteger(value);
    return hold(isKnown, at, value, `one of ${names.join(', ')}`);
  }
  const bits = type === 'TYPE_INT32' ? 32 : 64;
  const whole = wholeOf(value);
  const wrap = type.startsWith('TYPE_INT') ? BigInt.asIntN : BigInt.asUintN;
  hold(whole !== undefined && wrap(bits, whole) === whole, at, value, `an integer of ${bits} bits`);
}

// An integer: a safe number, its digits, or a Long.
function wholeOf(value: unknown): bigint | undefined {
  if (typeof value === 'number') return Number.isSafeInteger(value) ? BigInt(value) : undefined;
  const isLong = typeof value === 'object' && value !== null && 'low' in value;
  const digits = isLong || typeof value === 'string' ? String(value) : '';
  return /^-?\d{1,20}$/.test(digits) ? BigInt(digits) : undefined;
}

/** Throw a TypeError that names an option which is not known, or of the wrong kind. */
export function checkOptions(given: unknown, kinds: Record<string, string>): void {
  checkObject('options', given);
  checkNames('option', given, Object.keys(kinds));
  for (const [name, value] of Object.entries(given)) {
    const kind = kinds[name]!;
    const isOfKind = kind === 'AbortSignal'
      ? typeof value?.throwIfAborted === 'function'
      : typeof value === kind && !Number.isNaN(value);
    const article = /^[AO]/i.test(kind) ? 'an' : 'a';
    hold(value === undefined || isOfKind, `option ${name}`, value, `${article} ${kind}`);
  }
}

/** Throw a TypeError that names what should be an object, and is none. */
export function checkObject(name: string, given: unknown): asserts given is object {
  const isObject = typeof given === 'object' && given !== null && !Array.isArray(given);
  if (!isObject) throw misfit(name, given, 'an object');
}

/** Throw a TypeError that names what is wrong, unless something holds. */
export function hold(holds: boolean, name: string, value: unknown, allowed: string): void {
  if (!holds) throw misfit(name, value, allowed);
}

function misfit(name: string, value: unknown, allowed: string): TypeError {
  const shown = inspect(value, { depth: 0, maxStringLength: 40, breakLength: Infinity });
  return new TypeError(`${name} is ${shown}; it has to be ${allowed}`);
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

// Tests how schedsvc.mjs ends a lease while the scheduler is away. The tests run a server that
// fails on demand: node --test end.test.mjs

import assert from 'node:assert/strict';
import { after, before, beforeEach, test } from 'node:test';
import { Server, ServerCredentials, status } from '@grpc/grpc-js';
import { serviceClient } from './contract.mjs';
import { Scheduler } from './schedsvc.mjs';

const request = { tenant: 'red', inputTokens: [100], maxOutputTokens: 20 };
const server = new Server();
let scheduler;
let failures;
let completes;

before(async () => {
  server.addService(serviceClient().service, {
    admit: (_, answer) => {
      const grant = { leaseId: '7', pool: 'main', poolEpoch: '1', ttlMs: 30_000 };
      answer(null, { outcome: 'OUTCOME_GRANTED', grant });
    },
    complete: (call, answer) => {
      completes.push(call.request);
      const code = failures.shift();
      if (code === undefined) answer(null, { outcome: call.request.outcome, outputTokens: '3' });
      else answer({ code, details: 'told to' });
    },
  });
  const port = await new Promise((resolve, reject) => {
    server.bindAsync('127.0.0.1:0', ServerCredentials.createInsecure(), (error, bound) =>
      error ? reject(error) : resolve(bound),
    );
  });
  // A proxy that does not answer: it is for other hosts, never for a scheduler on this one.
  process.env.https_proxy = 'http://127.0.0.1:9';
  scheduler = new Scheduler(`127.0.0.1:${port}`);
});

beforeEach(() => {
  failures = [];
  completes = [];
});

after(() => {
  scheduler.close();
  server.forceShutdown();
});

test('an end that does not arrive is repeated, the same', async () => {
  failures = [...Array(5).fill(status.UNAVAILABLE), status.DEADLINE_EXCEEDED];
  const admission = await scheduler.admit(request);
  const books = await admission.complete({ outputTokens: 3 });
  assert.equal(books.outputTokens, 3);
  assert.equal(completes.length, 7);
  for (const complete of completes) assert.deepEqual(complete, completes[0]);
  assert.equal(completes[0].leaseId, '7');
});

test('an end that cannot succeed is not repeated', async () => {
  failures = [status.NOT_FOUND, status.NOT_FOUND];
  const admission = await scheduler.admit(request);
  await assert.rejects(admission.cancel(), { name: 'CallFailed', code: status.NOT_FOUND });
  assert.equal(completes.length, 1);
});

test('a result does not wait for an end that takes long', async () => {
  // A machine that stands still is late for once, but not each time.
  let waitedMs = Infinity;
  for (let tries = 3; tries > 0 && waitedMs >= 2_000; tries -= 1) {
    failures = Array(7).fill(status.UNAVAILABLE);
    completes = [];
    const started = Date.now();
    let admission;
    const result = await scheduler.withAdmission(request, async (given) => {
      admission = given;
      return 'text';
    });
    waitedMs = Date.now() - started;
    assert.equal(result, 'text');
    const attempts = completes.length;
    const books = await admission.complete();
    assert.equal(books.outcome, 'OUTCOME_COMPLETED');
    assert.ok(attempts < completes.length);
    assert.equal(completes.length, 8);
  }
  assert.ok(waitedMs < 2_000, `${waitedMs} ms`);
});

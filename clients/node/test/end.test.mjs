// Tests how the client ends a lease while the scheduler is away: node --test end.test.mjs

import assert from 'node:assert/strict';
import { afterEach, beforeEach, test } from 'node:test';
import { Scheduler } from 'schedsvc';
import { delayed, FakeScheduler, status } from 'schedsvc/testing';

const request = { tenant: 'red', inputTokens: [100], maxOutputTokens: 20 };
let fake;
let scheduler;

beforeEach(async () => {
  fake = new FakeScheduler();
  await fake.start();
  // A proxy that does not answer: it is for other hosts, never for a scheduler on this one.
  process.env.https_proxy = 'http://127.0.0.1:9';
  scheduler = new Scheduler(fake.target);
});

afterEach(async () => {
  await scheduler.close();
  fake.stop();
});

const attempts = () => fake.calls.filter(({ method }) => method === 'Complete').length;

test('an end that does not arrive is repeated, the same', async () => {
  fake.fail('Complete', ...Array(5).fill(status.UNAVAILABLE), status.DEADLINE_EXCEEDED);
  const admission = await scheduler.admit(request);
  const books = await admission.complete({ outputTokens: 3 });
  assert.equal(books.outputTokens, 3);
  assert.equal(attempts(), 7);
  assert.equal(fake.leases.get(admission.leaseId).ends.length, 1);
});

test('an end that cannot succeed is not repeated', async () => {
  fake.fail('Complete', status.NOT_FOUND, status.NOT_FOUND);
  const admission = await scheduler.admit(request);
  await assert.rejects(admission.cancel(), { name: 'CallFailed', code: status.NOT_FOUND });
  assert.equal(attempts(), 1);
});

test('a result does not wait for an end that takes long', async () => {
  // A machine that stands still is late for once, but not each time.
  let waitedMs = Infinity;
  for (let tries = 3; tries > 0 && waitedMs >= 2_000; tries -= 1) {
    fake.fail('Complete', ...Array(7).fill(status.UNAVAILABLE));
    const before = attempts();
    const started = Date.now();
    let admission;
    const result = await scheduler.withAdmission(request, async (given) => {
      admission = given;
      return 'text';
    });
    waitedMs = Date.now() - started;
    assert.equal(result, 'text');
    const made = attempts() - before;
    const books = await admission.complete();
    assert.equal(books.outcome, 'OUTCOME_COMPLETED');
    assert.ok(made < attempts() - before);
    assert.equal(attempts() - before, 8);
  }
  assert.ok(waitedMs < 2_000, `${waitedMs} ms`);
});

test('close() cancels what runs, withdraws what waits, and waits for every end', async () => {
  fake.fail('Complete', status.UNAVAILABLE, status.UNAVAILABLE);
  fake.script(delayed(0), delayed(Infinity));
  await scheduler.admit(request);
  const waiting = assert.rejects(scheduler.admit(request), { message: /was closed/ });
  while (fake.requests.length < 2) await new Promise(setImmediate);
  await scheduler.close();
  await waiting;
  assert.deepEqual([fake.live.length, attempts()], [0, 3]);
  assert.equal(fake.leases.get('1').ends[0].outcome, 'OUTCOME_CANCELLED');
  assert.deepEqual(fake.withdrawn, [fake.requests[1].requestId]);
  await assert.rejects(scheduler.admit(request), { message: /was closed/ });
  assert.equal(fake.requests.length, 2);
});

test('a grant that was on its way to a request that was withdrawn is returned', async () => {
  const controller = new AbortController();
  // The grant is out, and the client does not read it before it withdraws.
  fake.decide = () => {
    process.nextTick(() => controller.abort(new Error('the user left')));
    return delayed(0);
  };
  await assert.rejects(scheduler.admit(request, { signal: controller.signal }), /the user left/);
  await scheduler.close();
  assert.deepEqual([fake.leases.size, fake.live.length], [1, 0]);
  const [{ ends }] = fake.leases.values();
  assert.deepEqual([ends[0].outcome, ends[0].inputTokens], ['OUTCOME_CANCELLED', '0']);
});

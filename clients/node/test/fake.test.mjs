// Tests of the fake scheduler, and of how the client names a wrong use: node --test fake.test.mjs

import assert from 'node:assert/strict';
import { afterEach, beforeEach, test } from 'node:test';
import { CallFailed, Refused, Scheduler } from 'schedsvc';
import { delayed, failure, FakeScheduler, grant, refusal, status } from 'schedsvc/testing';

const request = { tenant: 'red', inputTokens: [100], maxOutputTokens: 20 };
let fake;
let scheduler;

beforeEach(async () => {
  fake = new FakeScheduler();
  await fake.start();
  scheduler = new Scheduler(fake.target);
});

afterEach(async () => {
  await scheduler.close();
  fake.stop();
});

test('verdicts come as scripted, then as decided', async () => {
  const quota = { limits: [{ kind: 'LIMIT_KIND_REQUESTS', limit: 5, remaining: 0, resetMs: 700 }] };
  fake.script(
    grant({ leaseId: '70', pool: 'gpu-2' }),
    refusal('OUTCOME_REJECTED_QUOTA', { retryAfterMs: 700, message: 'a quota is spent', quota }),
    failure(status.UNAVAILABLE, 'gone'),
  );
  const first = await scheduler.admit(request);
  assert.deepEqual([first.leaseId, first.pool, first.reservedTokens], ['70', 'gpu-2', 64]);
  await assert.rejects(scheduler.admit(request), (error) => {
    assert.ok(error instanceof Refused);
    assert.deepEqual([error.message, error.retryAfterMs], ['a quota is spent', 700]);
    assert.equal(error.limits[0].resetMs, 700);
    return true;
  });
  const gone = { name: 'CallFailed', code: status.UNAVAILABLE, message: 'Admit: gone' };
  await assert.rejects(scheduler.admit(request), gone);
  fake.decide = ({ tenant }) => (tenant === 'red' ? grant() : refusal('OUTCOME_EVICTED_TTL'));
  assert.equal((await scheduler.admit(request)).leaseId, '2');
  const asking = scheduler.admit({ ...request, tenant: 'blue' });
  await assert.rejects(asking, { outcome: 'OUTCOME_EVICTED_TTL' });
  assert.deepEqual(fake.requests.map(({ tenant }) => tenant), [...Array(4).fill('red'), 'blue']);
});

test('a verdict comes late, or when it is released', async () => {
  fake.script(delayed(20), delayed(Infinity, refusal('OUTCOME_EVICTED_TTL')));
  await (await scheduler.admit(request)).complete();
  const held = scheduler.admit({ ...request, requestId: 'held' });
  while (fake.requests.length < 2) await new Promise(setImmediate);
  assert.throws(() => fake.release('other'), /no Admit of other is held back/);
  fake.release('held');
  await (await held).complete();
  assert.deepEqual([fake.leases.size, fake.live.length], [2, 0]);
});

test('the books of a lease hold what was reported', async () => {
  fake.ttlMs = 30;
  const admission = await scheduler.admit(request);
  const lease = fake.leases.get(admission.leaseId);
  admission.report({ inputTokens: 100, outputTokens: 3 });
  while (!lease.reports.some(({ outputTokens }) => outputTokens === '3')) {
    await new Promise(setImmediate);
  }
  lease.state = 99; // of a later version
  const { length } = lease.reports;
  while (lease.reports.length < length + 2) await new Promise(setImmediate);
  assert.ok(!admission.signal.aborted);
  lease.state = 'LEASE_STATE_VOID';
  while (!admission.signal.aborted) await new Promise(setImmediate);
  const books = await admission.complete({ outputTokens: 9 });
  assert.deepEqual([books.inputTokens, books.outputTokens], [100, 9]);
  assert.equal(lease.ends[0].outcome, 'OUTCOME_COMPLETED');
});

test('it answers a request once, and knows no lease of another', async () => {
  const first = await scheduler.admit({ ...request, requestId: 'r' });
  const again = await scheduler.admit({ ...request, requestId: 'r' });
  assert.equal(again.leaseId, first.leaseId);
  const unknown = scheduler.call('Complete', { leaseId: '5' });
  await assert.rejects(unknown, { name: 'CallFailed', code: status.NOT_FOUND });
});

test('it can be away, and is found again', async () => {
  const { target } = fake;
  fake.stop();
  await assert.rejects(scheduler.admit(request), CallFailed);
  await fake.start();
  assert.equal(fake.target, target);
  let admission;
  while (!admission) admission = await scheduler.admit(request).catch(() => undefined);
  await admission.complete();
});

for (const [use, message] of [
  [() => scheduler.admit({ input_tokens: [1] }), 'field input_tokens; did you mean inputTokens'],
  [() => scheduler.admit({ inputToken: [1] }), 'field inputToken; did you mean inputTokens'],
  [() => scheduler.admit({ prompt: 1 }), /^unknown field prompt; known are requestId, tenant, /],
  [() => scheduler.stats({ tenant: ['a'] }), 'field tenant; did you mean tenants'],
  [
    () => scheduler.call('Progress', { leases: [{}, { lease_id: '7' }] }),
    'field lease_id; did you mean leaseId',
  ],
  [() => scheduler.admit(request, { Signal: 0 }), 'option Signal; did you mean signal'],
  [async () => new Scheduler('a:1', { tokens: 'x' }), 'option tokens; did you mean token'],
  [() => scheduler.call('admit', {}), 'method admit; did you mean Admit'],
]) {
  test(`wrong use is named: ${message}`, async () => {
    const expected = message instanceof RegExp ? message : `unknown ${message}`;
    await assert.rejects(use, { name: 'TypeError', message: expected });
    assert.equal(fake.requests.length, 0);
  });
}

test('a wrong total is named, and ends nothing', async () => {
  const admission = await scheduler.admit(request);
  const meant = { message: 'unknown total output_tokens; did you mean outputTokens' };
  assert.throws(() => admission.report({ output_tokens: 3 }), meant);
  assert.throws(() => admission.complete({ output_tokens: 3 }), meant);
  assert.equal(fake.live.length, 1);
});

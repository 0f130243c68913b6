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
  const quota = { limits: [{ kind: 'LIMIT_KIND_CONCURRENT_REQUESTS', limit: 5, resetMs: 700 }] };
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

const admit = (field) => scheduler.admit({ ...request, ...field });

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
  [() => admit({ inputTokens: 100 }), /^AdmitRequest.inputTokens is 100; it has to be a list$/],
  [() => admit({ inputTokens: [1, 'ten'] }), /inputTokens\[1\] is 'ten'; .* integer of 64 bits$/],
  [() => admit({ inputTokens: [2.5] }), /inputTokens\[0\] is 2.5; .* an integer/],
  [() => admit({ inputTokens: Array(1) }), /inputTokens\[0\] is undefined; .* an integer/],
  [() => admit({ maxOutputTokens: NaN }), /maxOutputTokens is NaN; .* an integer/],
  [() => admit({ maxOutputTokens: '9223372036854775808' }), /maxOutputTokens is .* an integer/],
  [() => admit({ n: 2 ** 31 }), /n is 2147483648; it has to be an integer of 32 bits$/],
  [() => admit({ prefixBlockHashes: [-1] }), /prefixBlockHashes\[0\] is -1; .* an integer/],
  [() => admit({ tenant: { name: 'red' } }), /tenant is .*; it has to be text$/],
  [() => admit({ apiKeySha256: 'é' }), /apiKeySha256 is 'é'; .* bytes, or text in base64$/],
  [() => admit({ tenantProof: 'TOKEN' }), /'TOKEN'; it has to be one of .*TENANT_PROOF_TOKEN/],
  [() => admit({ wholeAnswer: 'no' }), /wholeAnswer is 'no'; it has to be true or false$/],
  [() => scheduler.admit(), /^AdmitRequest is undefined; it has to be an object$/],
  [() => scheduler.call('Progress', { leases: { leaseId: 1 } }), /leases is .* has to be a list$/],
  [() => scheduler.explain({ requestId: 'r' }), /requestId is .*; it has to be text$/],
  [() => scheduler.admit(request, { deadlineMs: 'soon' }), /deadlineMs is 'soon'; .* a number$/],
  [() => scheduler.admit(request, { signal: {} }), /signal is {}; .* an AbortSignal$/],
  [async () => new Scheduler(['a:1', 'b:1']), /^target is .*; it has to be a string$/],
  [async () => new Scheduler('a:1', { silentAfterMs: NaN }), /silentAfterMs is NaN; .* a number$/],
  [async () => new Scheduler('a:1', { token: 5 }), /^option token is 5; it has to be a string$/],
]) {
  test(`wrong use is named: ${message}`, async () => {
    const expected = message instanceof RegExp ? message : `unknown ${message}`;
    await assert.rejects(use, { name: 'TypeError', message: expected });
    assert.equal(fake.requests.length, 0);
  });
}

for (const [use, message] of [
  [() => grant({ lease_id: '9' }), /^unknown field lease_id; did you mean leaseId$/],
  [() => refusal('REJECTED_QUOTA'), /outcome is 'REJECTED_QUOTA'; it has to be one of /],
  [() => refusal(), /^the outcome is undefined; it has to be one of the contract$/],
  [() => refusal('OUTCOME_GRANTED'), /^the outcome of a refusal is 'OUTCOME_GRANTED'; /],
  [() => refusal('OUTCOME_EVICTED_TTL', { retry_after_ms: 5 }), /did you mean retryAfterMs$/],
  [
    () => refusal('OUTCOME_REJECTED_QUOTA', { quota: { limits: [{ kind: 'REQUESTS' }] } }),
    /^AdmitResponse.refusal.quota.limits\[0\].kind is 'REQUESTS'; it has to be one of /,
  ],
  [() => failure('UNAVAILABLE'), /^the code of a failure is 'UNAVAILABLE'; /],
  [() => failure(status.OK), /^the code of a failure is 0; /],
  [() => delayed(grant(), 20), /^delayMs is .*; it has to be a number, 0 or more$/],
  [() => delayed(5, [grant()]), /^unknown field 0; /],
  [() => [grant(), grant()], /^the verdict is .*; it has to be an object$/],
]) {
  test(`a wrong verdict is named: ${message}`, async () => {
    assert.throws(() => fake.script(use()), { name: 'TypeError', message });
    fake.decide = use;
    const { source } = message;
    const asked = new RegExp(source.replace('^', '^Admit: FakeScheduler.decide: TypeError: '));
    await assert.rejects(scheduler.admit(request), { code: status.INTERNAL, message: asked });
  });
}

test('a wrong use of the fake is named', async () => {
  const { leaseId } = await scheduler.admit(request);
  for (const [use, message] of [
    [() => fake.fail('admit', status.UNAVAILABLE), /^unknown method admit; did you mean Admit$/],
    [() => fake.fail('Admit'), /one code at least$/],
    [() => fake.fail('Admit', 'UNAVAILABLE'), /^the code of a failure is 'UNAVAILABLE'; /],
    [() => (fake.leases.get(leaseId).state = 'VOID'), /state is 'VOID'; it has to be one of /],
    [() => (fake.ttl = 5), /Cannot add property ttl/],
  ]) {
    assert.throws(use, { name: 'TypeError', message });
  }
  fake.decide = async () => grant();
  const named = /the outcome is undefined; it has to be one of the contract$/;
  await assert.rejects(scheduler.admit(request), { code: status.INTERNAL, message: named });
});

test('an outcome of a later version is unspecified', async () => {
  fake.script(refusal(31, { retryAfterMs: 5 }));
  const later = { name: 'Refused', outcome: 'OUTCOME_UNSPECIFIED', retryAfterMs: 5 };
  await assert.rejects(scheduler.admit(request), later);
});

test('what is undefined counts as absent', async () => {
  const options = { token: undefined, channelCredentials: undefined, failoverWaitMs: undefined };
  const client = new Scheduler(fake.target, options);
  const asked = { ...request, requestId: undefined };
  const admission = await client.admit(asked, { deadlineMs: undefined });
  assert.match(admission.requestId, /^[0-9a-f-]{36}$/);
  assert.equal(fake.requests[0].requestId, admission.requestId);
  admission.report({ inputTokens: 100, outputTokens: 3 });
  admission.report({ inputTokens: undefined, outputTokens: 4 });
  const { inputTokens, outputTokens } = await admission.complete();
  assert.deepEqual([inputTokens, outputTokens], [100, 4]);
  await client.close();
});

test('a call without time left fails at once', async () => {
  fake.script(delayed(Infinity));
  const late = { name: 'CallFailed', code: status.DEADLINE_EXCEEDED };
  await assert.rejects(scheduler.admit(request, { deadlineMs: 0 }), late);
});

test('totals beyond the limits of the contract are brought within them', async () => {
  const admission = await scheduler.admit(request);
  const totals = { inputTokens: -1, cachedInputTokens: '-9', outputTokens: 2 ** 40 };
  const books = await admission.complete(totals);
  assert.deepEqual(
    [books.inputTokens, books.cachedInputTokens, books.outputTokens],
    [0, 0, 2 ** 27],
  );
});

test('a wrong total is named, and ends nothing', async () => {
  const admission = await scheduler.admit(request);
  for (const [totals, message] of [
    [{ output_tokens: 3 }, 'unknown total output_tokens; did you mean outputTokens'],
    [{ leaseId: '7' }, /^unknown total leaseId; /],
    [{ outputTokens: NaN }, 'totals.outputTokens is NaN; it has to be an integer of 64 bits'],
    [3, 'totals is 3; it has to be an object'],
    ['done', "totals is 'done'; it has to be an object"],
  ]) {
    assert.throws(() => admission.report(totals), { name: 'TypeError', message });
    assert.throws(() => admission.complete(totals), { name: 'TypeError', message });
  }
  const ends = /^outcome is 'COMPLETED'; it has to be one of OUTCOME_COMPLETED, OUTCOME_CANCELLED$/;
  assert.throws(() => admission.end('COMPLETED'), { name: 'TypeError', message: ends });
  assert.equal(fake.live.length, 1);
});

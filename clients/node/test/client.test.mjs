// Tests of the client against a live scheduler: SCHEDSVC_TARGET, whose pool runs one request at a
// time for the tenant red, with leases of three seconds. `make test` starts it and runs this.

import assert from 'node:assert/strict';
import { after, afterEach, test } from 'node:test';
import { CallFailed, Refused, Scheduler } from 'schedsvc';
import { channelCredentials, sleep } from './wire.mjs';

const LEASE_TTL_MS = 3_000;
const { SCHEDSVC_TARGET: target } = process.env;
const scheduler = new Scheduler(target, { token: 'secret', channelCredentials });
const request = { tenant: 'red', inputTokens: [100], maxOutputTokens: 20, reportsProgress: true };

async function flow() {
  const { flows } = await scheduler.stats({ tenants: ['red'] });
  return flows[0];
}

async function queued(count) {
  while (Number((await flow()).queued) !== count) await sleep(10);
}

after(() => scheduler.close());

afterEach(async () => {
  const { totals } = await scheduler.stats();
  assert.deepEqual([totals.queued, totals.liveLeases, totals.promisedTokens], ['0', '0', '0']);
});

test('what runs, was refused or is unknown is explained', async () => {
  const [running, missing] = await scheduler.withAdmission(
    { ...request, requestId: 'explained' },
    async () => [await scheduler.explain('explained'), await scheduler.explain('nobody')],
  );
  assert.deepEqual([running[0].tenant, running[0].state], ['red', 'REQUEST_STATE_LIVE']);
  assert.equal(missing.length, 0);
  const large = { ...request, requestId: 'large', inputTokens: [10_000_000] };
  await assert.rejects(scheduler.admit(large), Refused);
  const [refused] = await scheduler.explain('large', { tenant: 'red' });
  assert.equal(refused.state, 'REQUEST_STATE_REFUSED');
  assert.equal(refused.outcome, 'OUTCOME_REJECTED_TOO_LARGE');
  assert.match(refused.message, /larger than/);
});

test('work that returns is completed with what it reported', async () => {
  const before = await flow();
  const result = await scheduler.withAdmission(request, async (admission) => {
    assert.equal(admission.pool, 'main');
    assert.ok(admission.reservedTokens >= 120);
    assert.ok(admission.queueDurationMs >= 0);
    admission.report({ inputTokens: 100, cachedInputTokens: 16 });
    admission.report({ outputTokens: 7 });
    return 'text';
  });
  assert.equal(result, 'text');
  const after = await flow();
  assert.equal(after.completed - before.completed, 1);
  assert.equal(after.inputTokens - before.inputTokens, 100);
  assert.equal(after.cachedInputTokens - before.cachedInputTokens, 16);
  assert.equal(after.outputTokens - before.outputTokens, 7);
});

test('work that throws is cancelled, and its error passes', async () => {
  const before = await flow();
  const failing = scheduler.withAdmission(request, async (admission) => {
    admission.report({ inputTokens: 100, outputTokens: 3 });
    throw new RangeError('the engine failed');
  });
  await assert.rejects(failing, { name: 'RangeError', message: 'the engine failed' });
  const after = await flow();
  assert.equal(after.cancelled - before.cancelled, 1);
  assert.equal(after.outputTokens - before.outputTokens, 3);
});

test('a refusal says why and when to come back', async () => {
  const asking = scheduler.admit({ ...request, inputTokens: [1_000_000] });
  await assert.rejects(asking, (error) => {
    assert.ok(error instanceof Refused);
    assert.equal(error.outcome, 'OUTCOME_REJECTED_TOO_LARGE');
    assert.equal(error.retryAfterMs, 0);
    assert.ok(error.limits.some(({ kind, limit }) => kind && limit > 0));
    return true;
  });
});

test('a full queue names its limit', async () => {
  await scheduler.withAdmission(request, async () => {
    const controller = new AbortController();
    const waiting = scheduler.admit(request, { signal: controller.signal });
    await queued(1);
    await assert.rejects(scheduler.admit(request), (error) => {
      assert.equal(error.outcome, 'OUTCOME_REJECTED_FLOW_QUEUE_FULL');
      assert.ok(error.retryAfterMs > 0);
      const limit = error.limits.find(({ kind }) => kind === 'LIMIT_KIND_QUEUED_REQUESTS');
      assert.deepEqual([limit.limit, limit.remaining], [1, 0]);
      return true;
    });
    controller.abort(new Error('the user left'));
    await assert.rejects(waiting, { message: 'the user left' });
    await queued(0);
  });
});

test('a wrong field is named', async () => {
  await assert.rejects(scheduler.admit({ ...request, inputTokens: [5, 0] }), (error) => {
    assert.ok(error instanceof CallFailed);
    assert.deepEqual(error.fields.map(({ field }) => field), ['input_tokens[1]']);
    assert.match(error.message, /Admit: input_tokens\[1\]: /);
    return true;
  });
});

test('too many prefix hashes are refused with their number', async () => {
  const prefixBlockHashes = Array.from({ length: 20_000 }, (_, n) => String(n));
  await assert.rejects(scheduler.admit({ ...request, prefixBlockHashes }), (error) => {
    assert.ok(error instanceof CallFailed);
    assert.match(error.message, /prefix_block_hashes: has 20000 hashes; at most 4096 are allowed/);
    return true;
  });
});

test('a wrong token is a failed call', async () => {
  const stranger = new Scheduler(target, { token: 'wrong', channelCredentials });
  await assert.rejects(stranger.stats(), { name: 'CallFailed', code: 16 });
  await stranger.close();
});

test('a lease is renewed in the background', async () => {
  const admission = await scheduler.admit(request);
  await sleep(2.5 * LEASE_TTL_MS);
  // TTL and grace are over. A renewal that this machine held up comes a moment later.
  let pool;
  do [pool] = (await scheduler.stats()).pools;
  while (pool.liveLeases === '1' && pool.suspectLeases !== '0');
  assert.deepEqual([pool.liveLeases, pool.suspectLeases], ['1', '0']);
  assert.equal(admission.signal.aborted, false);
  const books = await admission.complete({ inputTokens: 100, outputTokens: 9 });
  assert.deepEqual(books, {
    outcome: 'OUTCOME_COMPLETED',
    inputTokens: 100,
    cachedInputTokens: 0,
    outputTokens: 9,
  });
});

test('a lease that is lost aborts its signal', async () => {
  const admission = await scheduler.admit(request);
  await scheduler.call('Complete', { leaseId: admission.leaseId, poolEpoch: '1' });
  while (!admission.signal.aborted) await sleep(20);
  assert.match(admission.signal.reason.message, /LEASE_STATE_ENDED/);
  await admission.cancel();
});

test('the first end wins', async () => {
  const admission = await scheduler.admit(request);
  const books = await admission.complete({ inputTokens: 100, outputTokens: 2 });
  assert.deepEqual(await admission.cancel({ outputTokens: 50 }), books);
});

test('what is disposed of without an end is cancelled', async () => {
  const before = await flow();
  const admission = await scheduler.admit(request);
  await admission[Symbol.asyncDispose]();
  assert.equal((await flow()).cancelled - before.cancelled, 1);
});

test('a request that was withdrawn before it was sent stays unsent', async () => {
  const before = await flow();
  const signal = AbortSignal.abort(new Error('too late'));
  await assert.rejects(scheduler.admit(request, { signal }), { message: 'too late' });
  assert.equal((await flow()).received, before.received);
});

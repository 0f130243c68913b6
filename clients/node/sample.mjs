// One completion through the scheduler: node sample.mjs SCHEDULER ENGINE [PROMPT]
// e.g. node sample.mjs unix:/run/schedsvc/schedsvc.sock http://127.0.0.1:8000 'Once upon a time'
// The engine is an OpenAI-compatible server that has no gate of its own.

import { createInterface } from 'node:readline';
import { Readable } from 'node:stream';
import { Refused, Scheduler } from './schedsvc.mjs';

const [target, engine, prompt = 'Once upon a time'] = process.argv.slice(2);
if (!engine) {
  console.error('usage: node sample.mjs SCHEDULER ENGINE [PROMPT]');
  process.exit(2);
}
const MAX_OUTPUT_TOKENS = 64;

async function ask(path, body, signal) {
  const init = body && { method: 'POST', body: JSON.stringify(body), signal };
  const headers = { 'content-type': 'application/json' };
  const response = await fetch(engine + path, { ...init, headers });
  if (!response.ok) throw new Error(`${path}: ${response.status} ${await response.text()}`);
  return response;
}

/** The JSON of each server-sent event. */
async function* events(response) {
  for await (const line of createInterface({ input: Readable.fromWeb(response.body) })) {
    if (line.startsWith('data: {')) yield JSON.parse(line.slice('data: '.length));
  }
}

const scheduler = new Scheduler(target, { token: process.env.SCHEDSVC_TOKEN });
try {
  const model = (await (await ask('/v1/models')).json()).data[0].id;
  const { count } = await (await ask('/tokenize', { model, prompt })).json();
  const request = {
    tenant: process.env.TENANT ?? 'node-sample',
    inputTokens: [count],
    maxOutputTokens: MAX_OUTPUT_TOKENS,
    reportsProgress: true,
  };
  await scheduler.withAdmission(request, async (admission) => {
    let last;
    console.error(`granted in ${admission.pool} after ${admission.queueDurationMs.toFixed(1)} ms`);
    const body = {
      model,
      prompt,
      max_tokens: MAX_OUTPUT_TOKENS,
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
    };
    // The admission's signal stops the engine's work when the lease is lost.
    const response = await ask('/v1/completions', body, admission.signal);
    for await (const { choices, usage } of events(response)) {
      process.stdout.write(choices[0]?.text ?? '');
      if (usage) {
        last = usage;
        const { prompt_tokens: inputTokens, completion_tokens: outputTokens } = usage;
        admission.report({ inputTokens, outputTokens });
      }
    }
    process.stdout.write('\n');
    console.error(`${last.prompt_tokens} input tokens, ${last.completion_tokens} output tokens`);
  });
} catch (error) {
  const hint = error instanceof Refused ? ` (retry after ${error.retryAfterMs} ms)` : '';
  console.error(`${error.name}: ${error.message}${hint}`);
  process.exitCode = 1;
} finally {
  scheduler.close();
}

// One completion through the scheduler: node sample.js SCHEDULER ENGINE [PROMPT]
// e.g. node sample.js unix:/run/schedsvc/schedsvc.sock http://127.0.0.1:8000 'Once upon a time'
// The engine is an OpenAI-compatible server that has no gate of its own.

import { Refused, Scheduler } from 'schedsvc';

const MAX_OUTPUT_TOKENS = 64;

interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
}

async function ask(url: string, body?: object, signal?: AbortSignal): Promise<Response> {
  const init = body && { method: 'POST', body: JSON.stringify(body), signal: signal ?? null };
  const response = await fetch(url, { ...init, headers: { 'content-type': 'application/json' } });
  if (!response.ok) throw new Error(`${url}: ${response.status} ${await response.text()}`);
  return response;
}

/** The JSON of each server-sent event. */
async function* events(response: Response) {
  const reader = response.body!.getReader();
  const decoder = new TextDecoder();
  let text = '';
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const lines = (text + decoder.decode(part.value, { stream: true })).split('\n');
    text = lines.pop()!;
    for (const line of lines) {
      if (line.startsWith('data: {')) yield JSON.parse(line.slice('data: '.length));
    }
  }
}

async function complete(scheduler: Scheduler, engine: string, prompt: string): Promise<Usage> {
  const models = (await (await ask(`${engine}/v1/models`)).json()) as { data: { id: string }[] };
  const model = models.data[0]!.id;
  const tokenized = await ask(`${engine}/tokenize`, { model, prompt });
  const { count } = (await tokenized.json()) as { count: number };
  const request = {
    tenant: process.env.TENANT ?? 'node-sample',
    inputTokens: [count],
    maxOutputTokens: MAX_OUTPUT_TOKENS,
    reportsProgress: true,
  };
  return scheduler.withAdmission(request, async (admission) => {
    let last: Usage = { prompt_tokens: count, completion_tokens: 0 };
    console.error(`granted in ${admission.pool} after ${admission.queueDurationMs.toFixed(1)} ms`);
    const body = {
      model,
      prompt,
      max_tokens: MAX_OUTPUT_TOKENS,
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
    };
    // The admission's signal stops the engine's work when the lease is lost.
    const response = await ask(`${engine}/v1/completions`, body, admission.signal);
    for await (const { choices, usage } of events(response)) {
      process.stdout.write(choices[0]?.text ?? '');
      if (usage) {
        last = usage;
        const { prompt_tokens: inputTokens, completion_tokens: outputTokens } = last;
        admission.report({ inputTokens, outputTokens });
      }
    }
    process.stdout.write('\n');
    return last;
  });
}

async function main(target?: string, engine?: string, prompt = 'Once upon a time') {
  if (!target || !engine) {
    console.error('usage: node sample.js SCHEDULER ENGINE [PROMPT]');
    return 2;
  }
  const { SCHEDSVC_TOKEN: token = '' } = process.env;
  const scheduler = new Scheduler(target, { token });
  try {
    const usage = await complete(scheduler, engine, prompt);
    console.error(`${usage.prompt_tokens} input tokens, ${usage.completion_tokens} output tokens`);
    return 0;
  } catch (error) {
    const hint = error instanceof Refused ? ` (retry after ${error.retryAfterMs} ms)` : '';
    console.error(`${error}${hint}`);
    return 1;
  } finally {
    await scheduler.close();
  }
}

main(...process.argv.slice(2)).then((code) => (process.exitCode = code));

// One request by OpenAI's SDK for Node: ask.mjs URL TENANT WAY TOKENS. Prints what it saw as JSON.
import OpenAI from 'openai';

const [url, tenant, way, tokens] = process.argv.slice(2);
const client = new OpenAI({
  baseURL: `${url}/v1`,
  apiKey: 'any',
  maxRetries: way === 'retry' ? 8 : 0,
  defaultHeaders: { 'x-tenant-id': tenant },
});
const body = {
  model: 'emulated',
  messages: [{ role: 'user', content: 'Tell me a story.' }],
  max_tokens: Number(tokens),
  emulated_output_tokens: Number(tokens),
};
const seen = {};
try {
  if (way === 'whole' || way === 'retry') {
    const { usage } = await client.chat.completions.create(body);
    seen.usage = [usage.prompt_tokens, usage.completion_tokens];
  } else {
    seen.events = 0;
    const stream = await client.chat.completions.create({ ...body, stream: true });
    for await (const event of stream) {
      seen.events += event.choices.length;
      if (way === 'leave') {
        stream.controller.abort();
        break;
      }
    }
    seen.ended = way !== 'leave';
  }
} catch (error) {
  if (!error.status) throw error;
  seen.status = error.status;
  seen.code = error.code;
  seen.after = error.headers.get('retry-after');
}
console.log(JSON.stringify(seen));
process.exit(0);

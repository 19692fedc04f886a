// OpenAI's own client for JavaScript. tests/scripted_model.py has what the model says.

import assert from 'node:assert/strict';
import { test } from 'node:test';
import OpenAI from 'openai';
import { zodResponseFormat } from 'openai/helpers/zod';
import { z } from 'zod';

const client = new OpenAI({ maxRetries: 0, timeout: 300_000 });
const model = 'scripted';
const messages = [{ role: 'user', content: 'How is the weather?' }];
const parameters = {
  type: 'object',
  properties: { city: { type: 'string', minLength: 1 } },
  required: ['city'],
  additionalProperties: false,
};
const Weather = z.object({ city: z.string().min(1).max(20), degrees: z.number().int().min(-50).max(50) });

test('a stream is the whole answer', async () => {
  const stream = client.chat.completions.stream({ model, messages, stream_options: { include_usage: true } });
  const deltas = [];
  stream.on('content', (delta) => deltas.push(delta));
  const streamed = await stream.finalChatCompletion();
  const whole = await client.chat.completions.create({ model, messages });
  assert.equal(deltas.join(''), 'Hello there.');
  assert.equal(streamed.choices[0].message.content, 'Hello there.');
  assert.equal(whole.choices[0].message.content, 'Hello there.');
  assert.equal(streamed.usage.completion_tokens, whole.usage.completion_tokens);
  assert.equal(streamed.usage.total_tokens, whole.usage.total_tokens);
});

for (const stream of [false, true]) {
  test(`tools are run, ${stream ? 'streamed' : 'whole'}`, async () => {
    const asked = [];
    const weather = ({ city }) => {
      asked.push(city);
      return 'sunny';
    };
    const tool = { type: 'function', function: { name: 'weather', parameters, parse: JSON.parse, function: weather } };
    const runner = client.chat.completions.runTools({ model, messages, tools: [tool], stream });
    assert.equal(await runner.finalContent(), 'The sun shines.');
    assert.deepEqual(asked, ['Paris']);
  });
}

test('a tool that has to be called is', async () => {
  const tools = [{ type: 'function', function: { name: 'weather', strict: true, parameters } }];
  const reply = await client.chat.completions.create({ model, messages, tools, tool_choice: 'required' });
  for (const call of reply.choices[0].message.tool_calls) {
    assert.equal(call.function.name, 'weather');
    assert.ok(JSON.parse(call.function.arguments).city);
  }
});

test('an answer is parsed', async () => {
  const response_format = zodResponseFormat(Weather, 'weather');
  const reply = await client.chat.completions.parse({ model, messages, response_format });
  Weather.parse(reply.choices[0].message.parsed);
});

test('several answers and their logprobs', async () => {
  const reply = await client.chat.completions.create({ model, messages, n: 2, logprobs: true, top_logprobs: 2 });
  assert.deepEqual(reply.choices.map((choice) => choice.message.content), ['Hello there.', 'Hello there.']);
  const tokens = reply.choices[1].logprobs.content.map((entry) => entry.token);
  assert.deepEqual(tokens.slice(0, 2), ['Hello', ' there.']);
});

test('the completion of a text', async () => {
  const reply = await client.completions.create({ model, prompt: 'ab', max_tokens: 8 });
  assert.equal(reply.choices[0].text, 'cdefghab');
});

test('what is wrong is told by name', async () => {
  await assert.rejects(client.chat.completions.create({ model, messages, temperature: -1 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, 'temperature');
    return true;
  });
});

test('an answer that nobody waits for', async () => {
  const endless = { model, messages, max_tokens: 60_000, ignore_eos: true, stream: true };
  for await (const event of await client.chat.completions.create(endless)) {
    assert.equal(event.choices[0].delta.role, 'assistant');
    break;
  }
});

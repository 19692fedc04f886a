// Vercel's AI SDK, with this server as any that speaks OpenAI's protocol. tests/scripted_model.py has what the model says.

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateObject, generateText, isStepCount, streamObject, streamText, tool } from 'ai';
import { z } from 'zod';

const provider = createOpenAICompatible({
  name: 'splitserve',
  baseURL: process.env.OPENAI_BASE_URL,
  apiKey: process.env.OPENAI_API_KEY,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = provider('scripted');
const prompt = 'How is the weather?';
const maxRetries = 0;
const Weather = z.object({ city: z.string().min(1).max(20), degrees: z.number().int().min(-50).max(50) });
const weather = tool({
  description: 'Tells the weather of a city.',
  inputSchema: z.object({ city: z.string().min(1) }),
  execute: async ({ city }) => (city === 'Paris' ? 'sunny' : 'unknown'),
});

test('a stream is the whole answer', async () => {
  const streamed = streamText({ model, prompt, maxRetries });
  const parts = [];
  for await (const part of streamed.textStream) parts.push(part);
  const whole = await generateText({ model, prompt, maxRetries });
  assert.equal(parts.join(''), 'Hello there.');
  assert.equal(whole.text, 'Hello there.');
  assert.equal(whole.finishReason, 'stop');
  assert.equal(await streamed.finishReason, 'stop');
  const { inputTokens, outputTokens } = await streamed.usage;
  assert.ok(inputTokens > 0);
  assert.deepEqual([inputTokens, outputTokens], [whole.usage.inputTokens, whole.usage.outputTokens]);
});

test('tools are run', async () => {
  const asked = { model, prompt, maxRetries, tools: { weather }, stopWhen: isStepCount(3) };
  const whole = await generateText(asked);
  assert.equal(whole.text, 'The sun shines.');
  assert.deepEqual(whole.steps[0].toolCalls[0].input, { city: 'Paris' });
  assert.equal(await streamText(asked).text, 'The sun shines.');
});

test('a tool that has to be called is', async () => {
  for (const toolChoice of ['required', { type: 'tool', toolName: 'weather' }]) {
    const { toolCalls } = await generateText({ model, prompt, maxRetries, tools: { weather }, toolChoice });
    assert.equal(toolCalls[0].toolName, 'weather');
    assert.ok(toolCalls[0].input.city);
  }
});

test('an object of a schema', async () => {
  const { object } = await generateObject({ model, prompt, maxRetries, schema: Weather });
  Weather.parse(object);
  const streamed = streamObject({ model, prompt, maxRetries, schema: Weather });
  let last;
  for await (const part of streamed.partialObjectStream) last = part;
  assert.deepEqual(Weather.parse(last), await streamed.object);
  const choice = await generateObject({ model, prompt, maxRetries, output: 'enum', enum: ['rain', 'snow'] });
  assert.ok(['rain', 'snow'].includes(choice.object));
});

test('the completion of a text', async () => {
  const text = await generateText({ model: provider.completionModel('scripted'), prompt, maxRetries, maxOutputTokens: 8 });
  assert.equal(text.usage.outputTokens, 8);
});

test('what is wrong is told', async () => {
  await assert.rejects(generateText({ model, prompt, maxRetries, temperature: -1 }), /temperature must be within/);
});

test('an answer that nobody waits for', async () => {
  const controller = new AbortController();
  const endless = { maxOutputTokens: 60_000, providerOptions: { splitserve: { ignore_eos: true } } };
  const { textStream } = streamText({ model, prompt, maxRetries, ...endless, abortSignal: controller.signal });
  let numParts = 0;
  for await (const part of textStream) {
    numParts += part.length > 0;
    if (numParts === 5) controller.abort();
  }
  assert.ok(numParts >= 5);
});

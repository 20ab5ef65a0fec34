/** The model server of the tests, spoken to as an agent does. */
import { assert, assertEquals, assertRejects, assertStringIncludes } from "@std/assert";
import { findNonce, startFakeModelServer, steps } from "./fake_model_server.ts";

function post(url: string, path: string, body: unknown): Promise<Response> {
  return fetch(`${url}${path}`, { method: "POST", body: JSON.stringify(body) });
}

const chat = (model: string, stream: boolean, more: readonly unknown[] = []) => ({
  model,
  stream,
  messages: [
    { role: "system", content: "Be good." },
    { role: "user", content: [{ type: "text", text: 'Review.\n"nonce": "n1"\n' }] },
    ...more,
  ],
  tools: [{ type: "function", function: { name: "bash" } }],
});
const responses = (model: string, stream: boolean) => ({
  model,
  stream,
  input: [{ type: "message", role: "user", content: [{ type: "input_text", text: "Work." }] }],
  tools: [{ type: "function", name: "exec_command" }],
});

/** The JSON of a stream's events. */
function readEvents(text: string): Record<string, unknown>[] {
  return [...text.matchAll(/^data: (\{.*\})$/gm)].map(([, json]) => JSON.parse(json!));
}

Deno.test("the server answers on loopback only", async () => {
  await using server = startFakeModelServer();
  assertStringIncludes(server.url, "//127.0.0.1:");
});

Deno.test("chat completions: an answer in one piece and as a stream say the same", async () => {
  await using server = startFakeModelServer();
  const whole = await (await post(server.url, "/chat/completions", chat("verdict", false))).json();
  const { content } = whole.choices[0].message;
  assertEquals(JSON.parse(content).nonce, "n1");
  const text = await (await post(server.url, "/chat/completions", chat("verdict", true))).text();
  const deltas = readEvents(text).flatMap(({ choices }) =>
    choices as { delta: { content?: string } }[]
  );
  assertEquals(deltas.map(({ delta }) => delta.content ?? "").join(""), content);
  assert(text.endsWith("data: [DONE]\n\n"));
  assertEquals(server.requests.map(({ model, prompt, tools }) => [model, prompt, tools]), [
    ["verdict", 'Review.\n"nonce": "n1"\n', ["bash"]],
    ["verdict", 'Review.\n"nonce": "n1"\n', ["bash"]],
  ]);
});

Deno.test("chat completions: tool calls come one after the other, then the answer", async () => {
  await using server = startFakeModelServer({ twice: steps([{ run: "a" }, { run: "b" }], "end") });
  const said: unknown[] = [];
  const more: unknown[] = [];
  for (let round = 0; round < 3; round++) {
    const { choices } =
      await (await post(server.url, "/chat/completions", chat("twice", false, more))).json();
    const [call] = choices[0].message.tool_calls ?? [];
    said.push(
      call === undefined ? choices[0].message.content : JSON.parse(call.function.arguments).command,
    );
    more.push(choices[0].message, { role: "tool", tool_call_id: call?.id, content: "ran" });
  }
  assertEquals(said, ["a", "b", "end"]);
  assertEquals(server.requests.at(-1)!.toolOutputs, ["ran", "ran"]);
});

Deno.test("responses: an answer, and a tool call in the words of the tool that is offered", async () => {
  await using server = startFakeModelServer();
  const whole = await (await post(server.url, "/responses", responses("answer", false))).json();
  const answer = await (await post(server.url, "/responses", responses("answer", true))).text();
  const done = readEvents(answer).at(-1)!;
  assertEquals([done.type, done.response], ["response.completed", whole]);
  const call = await (await post(server.url, "/responses", responses("write", false))).json();
  assertEquals(call.output[0].name, "exec_command");
  assertStringIncludes(JSON.parse(call.output[0].arguments).cmd, "made.txt");
});

Deno.test("failures: refusals, an unknown model, a broken connection, silence", async () => {
  await using server = startFakeModelServer();
  const ask = (model: string) => post(server.url, "/chat/completions", chat(model, true));
  for (
    const [model, status] of [["unauthorized", 401], ["rate-limited", 429], ["broken", 500], [
      "no-such",
      404,
    ]] as const
  ) {
    const response = await ask(model);
    assertEquals(response.status, status);
    assert((await response.json()).error !== undefined || status === 404);
  }
  assertEquals(
    (await ask("rate-limited").then(async (r) => [r.headers.get("retry-after"), await r.text()]))[
      0
    ],
    "1",
  );
  await assertRejects(async () => await (await ask("drop")).text());
  const hanging = fetch(`${server.url}/chat/completions`, {
    method: "POST",
    body: JSON.stringify(chat("hang", true)),
    signal: AbortSignal.timeout(300),
  });
  await assertRejects(() => hanging, DOMException);
});

Deno.test("findNonce() finds what a verifier's prompt asks for", () => {
  assertEquals(findNonce('text\n"nonce": "a-b"'), "a-b");
  assertEquals(findNonce("text"), "no nonce in the prompt");
});

/**
 * A model server on loopback for agents that are run for real: OpenAI's chat completions, streamed and in
 * one piece, and its responses as a stream. The name of the model chooses the scenario that is played;
 * every request is kept, so that a test can compare what a model was sent with what it should have been.
 *
 * The wire formats are those that opencode 1.18.34 (chat completions) and codex 0.171.0 (responses)
 * understand.
 */

/** One request of an agent. */
export interface ModelRequest {
  readonly path: string;
  readonly model: string;
  /** The body as it came. */
  readonly body: string;
  /** The last message of a person: the prompt. */
  readonly prompt: string;
  /** What tools gave back since then, the oldest first. */
  readonly toolOutputs: readonly string[];
  /** Names of the tools that the agent offers. */
  readonly tools: readonly string[];
}

/** What the model does next. */
export type Act =
  /** Answers; slowly: in ten pieces with pauses between them. */
  | { readonly say: string; readonly isSlow?: boolean }
  /** Asks the agent to run a shell command. */
  | { readonly run: string }
  /** Asks the agent to write a file. */
  | { readonly write: string; readonly content: string }
  /** Refuses with a status of HTTP. */
  | { readonly status: number; readonly headers?: Readonly<Record<string, string>> }
  /** Breaks the connection in the middle of an answer. */
  | { readonly drop: true }
  /** Never answers. */
  | { readonly hang: true };

/** Chooses the next act for a request. */
export type Scenario = (request: ModelRequest) => Act;

/** A running server; it ends when it is disposed of. */
export interface FakeModelServer extends AsyncDisposable {
  /** Where the API begins, e.g. `http://127.0.0.1:1234/v1`. */
  readonly url: string;
  /** Every request so far, the oldest first. */
  readonly requests: ModelRequest[];
}

const USAGE = { input: 100, output: 20 };
const SLOW_PIECES = 10;
const SLOW_PAUSE_MS = 100;

/** Plays tool calls one after the other, then answers. */
export function steps(acts: readonly Act[], answer: string): Scenario {
  return ({ toolOutputs }) => acts[toolOutputs.length] ?? { say: answer };
}

/** The nonce that a verifier's prompt asks to be given back. */
export function findNonce(prompt: string): string {
  return /^"nonce": "(.*)"$/m.exec(prompt)?.[1] ?? "no nonce in the prompt";
}

/** A verdict with the nonce of a prompt. */
export function verdictFor(prompt: string, fields: Readonly<Record<string, unknown>> = {}): string {
  const verdict = { pass: true, score: 0.9, reasons: ["as asked"], next_hint: "", ...fields };
  return JSON.stringify({ ...verdict, nonce: findNonce(prompt) });
}

/** Scenarios by the name of the model. */
export const SCENARIOS: Readonly<Record<string, Scenario>> = {
  answer: () => ({ say: "There is nothing to do." }),
  verdict: ({ prompt }) => ({ say: verdictFor(prompt) }),
  fenced: ({ prompt }) => ({
    say: `My review:\n\n\`\`\`json\n${verdictFor(prompt)}\n\`\`\`\nThat is all.`,
  }),
  "two-verdicts": () => ({
    say: '{"pass": true, "score": 1}\nOn second thoughts:\n{"pass": false}',
  }),
  write: steps([{ write: "made.txt", content: "made by a tool\n" }], "Wrote made.txt."),
  unauthorized: () => ({ status: 401 }),
  "rate-limited": () => ({ status: 429, headers: { "retry-after": "1" } }),
  broken: () => ({ status: 500 }),
  drop: () => ({ drop: true }),
  hang: () => ({ hang: true }),
  empty: () => ({ say: "" }),
  slow: ({ prompt }) => ({ say: verdictFor(prompt), isSlow: true }),
};

/** Starts a server with SCENARIOS and those given, by the name of the model. */
export function startFakeModelServer(
  more: Readonly<Record<string, Scenario>> = {},
): FakeModelServer {
  const scenarios = { ...SCENARIOS, ...more };
  const requests: ModelRequest[] = [];
  const end = new AbortController();
  const server = Deno.serve(
    { hostname: "127.0.0.1", port: 0, signal: end.signal, onListen() {} },
    async (request) => {
      const path = new URL(request.url).pathname;
      if (request.method !== "POST" || !(path in PROTOCOLS)) {
        return Response.json({ error: { message: `nothing at ${path}` } }, { status: 404 });
      }
      const seen = readRequest(path, await request.text());
      requests.push(seen);
      const scenario = scenarios[seen.model];
      const act = scenario?.(seen) ?? { status: 404 };
      return await play(act, seen, end.signal);
    },
  );
  return {
    url: `http://127.0.0.1:${server.addr.port}/v1`,
    requests,
    async [Symbol.asyncDispose]() {
      end.abort();
      await server.finished;
    },
  };
}

/** An object of JSON, of which only what is needed is looked at. */
type Fields = Readonly<Record<string, unknown>>;

function listAt(fields: Fields, key: string): Fields[] {
  const value = fields[key];
  return Array.isArray(value) ? value : [];
}

/** The text of a message: a string, or a list of parts. */
function textAt(fields: Fields, key: string): string {
  const value = fields[key];
  if (typeof value === "string") return value;
  return listAt(fields, key).map((part) => typeof part.text === "string" ? part.text : "").join("");
}

/** A tool's name, which the two APIs put in different places. */
function toolName(tool: Fields): string {
  const { name } = (tool.function ?? tool) as Fields;
  return `${name ?? tool.type}`;
}

function readRequest(path: string, body: string): ModelRequest {
  const fields: Fields = JSON.parse(body);
  const items = [...listAt(fields, "messages"), ...listAt(fields, "input")];
  const last = items.findLastIndex((item) => item.role === "user");
  const outputs = items.slice(last + 1).filter((item) =>
    item.role === "tool" || item.type === "function_call_output"
  );
  return {
    path,
    model: `${fields.model}`,
    body,
    prompt: last < 0 ? "" : textAt(items[last]!, "content"),
    toolOutputs: outputs.map((item) => textAt(item, "content") || textAt(item, "output")),
    tools: listAt(fields, "tools").map(toolName),
  };
}

/** A tool call in the words of whatever agent asks. */
function callTool(
  act: Extract<Act, { run: string } | { write: string }>,
  tools: readonly string[],
) {
  const call = (name: string, fields: Fields) => ({ name, arguments: JSON.stringify(fields) });
  if ("run" in act) {
    return tools.includes("exec_command")
      ? call("exec_command", { cmd: act.run })
      : call("bash", { command: act.run, description: "a command" });
  }
  return tools.includes("exec_command")
    ? call("exec_command", { cmd: `cat >'${act.write}' <<'END'\n${act.content}END` })
    : call("write", { filePath: act.write, path: act.write, content: act.content });
}

async function play(act: Act, request: ModelRequest, end: AbortSignal): Promise<Response> {
  if ("status" in act) {
    const words = { 401: "Invalid API key", 429: "Rate limit reached" }[act.status] ?? "It failed";
    return Response.json({ error: { message: words, type: "error" } }, {
      status: act.status,
      headers: { ...act.headers },
    });
  }
  if ("hang" in act) {
    await new Promise((wake) => end.addEventListener("abort", wake, { once: true }));
    return new Response(null, { status: 503 });
  }
  const protocol = PROTOCOLS[request.path]!;
  if ("drop" in act) return stream(protocol.begin(), end, "drop");
  const isSlow = "say" in act && act.isSlow === true;
  const message: Message = "say" in act
    ? { text: act.say }
    : { call: callTool(act, request.tools), id: `call_${request.toolOutputs.length}` };
  if (JSON.parse(request.body).stream !== true) return Response.json(protocol.whole(message));
  const pieces = isSlow && "text" in message
    ? Array.from({ length: SLOW_PIECES }, (_, i) => {
      const size = Math.ceil(message.text.length / SLOW_PIECES);
      return message.text.slice(i * size, (i + 1) * size);
    })
    : ["text" in message ? message.text : ""];
  return stream(
    [...protocol.begin(), ...protocol.parts(message, pieces)],
    end,
    isSlow ? "slow" : "",
  );
}

/** Sends events one by one. */
function stream(
  events: readonly string[],
  end: AbortSignal,
  manner: "" | "drop" | "slow",
): Response {
  const encoder = new TextEncoder();
  let next = 0;
  const body = new ReadableStream<Uint8Array>({
    async pull(controller) {
      if (manner === "slow") await pause(SLOW_PAUSE_MS, end);
      const event = events[next++];
      if (event !== undefined) return controller.enqueue(encoder.encode(event));
      if (manner === "drop") controller.error("a connection dropped on purpose");
      else controller.close();
    },
  });
  return new Response(body, { headers: { "content-type": "text/event-stream" } });
}

function pause(milliseconds: number, end: AbortSignal): Promise<void> {
  return new Promise((wake) => {
    const timer = setTimeout(wake, milliseconds);
    end.addEventListener("abort", () => {
      clearTimeout(timer);
      wake();
    }, { once: true });
  });
}

type Message = { readonly text: string } | {
  readonly call: { readonly name: string; readonly arguments: string };
  readonly id: string;
};

/** How one API says things: in one piece, or as events. */
interface Protocol {
  begin(): string[];
  parts(message: Message, pieces: readonly string[]): string[];
  whole(message: Message): Fields;
}

const chatChunk = (fields: Fields) =>
  `data: ${
    JSON.stringify({
      id: "chat-1",
      object: "chat.completion.chunk",
      created: 1,
      model: "fake",
      ...fields,
    })
  }\n\n`;
const chatDelta = (delta: Fields, finish_reason: string | null = null) =>
  chatChunk({ choices: [{ index: 0, delta, finish_reason }] });
const chatUsage = {
  prompt_tokens: USAGE.input,
  completion_tokens: USAGE.output,
  total_tokens: USAGE.input + USAGE.output,
};

const CHAT: Protocol = {
  begin: () => [chatDelta({ role: "assistant" })],
  parts: (message, pieces) => [
    ...("text" in message
      ? [...pieces.map((content) => chatDelta({ content })), chatDelta({}, "stop")]
      : [
        chatDelta({
          tool_calls: [{ index: 0, id: message.id, type: "function", function: message.call }],
        }),
        chatDelta({}, "tool_calls"),
      ]),
    chatChunk({ choices: [], usage: chatUsage }),
    "data: [DONE]\n\n",
  ],
  whole: (message) => ({
    id: "chat-1",
    object: "chat.completion",
    created: 1,
    model: "fake",
    choices: [{
      index: 0,
      message: "text" in message ? { role: "assistant", content: message.text } : {
        role: "assistant",
        content: null,
        tool_calls: [{ id: message.id, type: "function", function: message.call }],
      },
      finish_reason: "text" in message ? "stop" : "tool_calls",
    }],
    usage: chatUsage,
  }),
};

const event = (type: string, fields: Fields) =>
  `event: ${type}\ndata: ${JSON.stringify({ type, ...fields })}\n\n`;
const responsesItem = (message: Message): Fields =>
  "text" in message
    ? {
      type: "message",
      id: "item-1",
      role: "assistant",
      status: "completed",
      content: [{ type: "output_text", text: message.text, annotations: [] }],
    }
    : {
      type: "function_call",
      id: "item-1",
      call_id: message.id,
      status: "completed",
      ...message.call,
    };
const responsesWhole = (message: Message): Fields => ({
  id: "response-1",
  object: "response",
  status: "completed",
  output: [responsesItem(message)],
  usage: {
    input_tokens: USAGE.input,
    input_tokens_details: { cached_tokens: 0 },
    output_tokens: USAGE.output,
    output_tokens_details: { reasoning_tokens: 0 },
    total_tokens: USAGE.input + USAGE.output,
  },
});

const RESPONSES: Protocol = {
  begin: () => [
    event("response.created", {
      response: { id: "response-1", object: "response", status: "in_progress", output: [] },
    }),
  ],
  parts: (message, pieces) => [
    ...("text" in message ? pieces : []).map((delta) =>
      event("response.output_text.delta", {
        item_id: "item-1",
        output_index: 0,
        content_index: 0,
        delta,
      })
    ),
    event("response.output_item.done", { output_index: 0, item: responsesItem(message) }),
    event("response.completed", { response: responsesWhole(message) }),
  ],
  whole: responsesWhole,
};

const PROTOCOLS: Readonly<Record<string, Protocol>> = {
  "/v1/chat/completions": CHAT,
  "/v1/responses": RESPONSES,
};

/**
 * Loops driven by real agents against a model server on loopback. The agents are installed from npm on the
 * first run (tests/agents.ts); where they cannot be, these tests are ignored with the reason.
 */
import { assert, assertEquals, assertNotEquals, assertStringIncludes } from "@std/assert";
import { ensureDirSync, existsSync } from "@std/fs";
import { join } from "@std/path";
import { type AgentName, describeProblem, findAgent } from "./agents.ts";
import {
  type Act,
  type FakeModelServer,
  type Scenario,
  startFakeModelServer,
  steps,
  verdictFor,
} from "./fake_model_server.ts";
import {
  git,
  loopDir,
  makeRepository,
  makeScratch,
  readJson,
  readLog,
  ROOT,
  runProgram,
  type Scratch,
  taskDir,
  writeFile,
  writeTask,
} from "./helpers.ts";
import {
  HARNESS,
  LOOP,
  readPhase,
  readState,
  TASK,
  tick,
  type TickResult,
} from "./runner_support.ts";
import { quoteShWord } from "../scripts/status.ts";

const AGENTS = { opencode: await findAgent("opencode"), codex: await findAgent("codex") };
const NAMES = Object.keys(AGENTS) as AgentName[];

/** A session of an agent whose model does one thing, and what becomes of the tick. */
interface Case {
  readonly role: "implement" | "verify" | "orchestrate";
  /** Name of the model, which is the name of the scenario. */
  readonly model: string;
  readonly does: string;
  readonly outcome: string | Readonly<Record<AgentName, string>>;
  /** Only a timeout ends it. */
  readonly isEndless?: true;
}

/** So long that a session under way never meets it, even on a busy machine. */
const TIMEOUT_S = 150;
/** What a session that never ends is given first; one that has not reached its model by then gets more. */
const SHORT_TIMEOUT_S = 15;

// deno-fmt-ignore -- a table: one row a line.
const CASES: readonly Case[] = [
  { role: "implement", model: "write", does: "writes a file by a tool call", outcome: "pass, implement -> code_review, made.txt committed" },
  { role: "implement", model: "write-outside", does: "is told to write outside the worktree", outcome: "pass, implement -> code_review, nothing written outside" },
  { role: "implement", model: "meddle", does: "calls `status --transition`, then leaves a process in a session of its own", outcome: "pass, implement -> code_review, command refused" },
  { role: "implement", model: "document", does: "reads the task's folder and writes the phase's document there", outcome: "pass, implement -> code_review, document written" },
  { role: "implement", model: "empty", does: "answers nothing", outcome: "pass, implement -> code_review" },
  { role: "implement", model: "unauthorized", does: "refuses with 401", outcome: "skip harness_failed" },
  { role: "implement", model: "rate-limited", does: "refuses with 429", outcome: "skip backoff" },
  { role: "implement", model: "broken", does: "refuses with 500", outcome: { opencode: "skip harness_timeout", codex: "skip harness_failed" }, isEndless: true },
  { role: "implement", model: "drop", does: "breaks the connection", outcome: { opencode: "skip harness_timeout", codex: "skip harness_failed" }, isEndless: true },
  { role: "implement", model: "hang", does: "never answers", outcome: "skip harness_timeout", isEndless: true },
  { role: "verify", model: "verdict", does: "answers with a verdict", outcome: "pass, implement -> code_review" },
  { role: "verify", model: "fenced", does: "puts the verdict into a fence, with words around it", outcome: "pass, implement -> code_review" },
  { role: "verify", model: "two-verdicts", does: "gives two verdicts that disagree, both without the nonce", outcome: "halt verifier_failed" },
  { role: "verify", model: "empty", does: "answers nothing", outcome: "halt verifier_failed" },
  { role: "verify", model: "touch", does: "is told to write a file, then answers with a verdict", outcome: "pass, implement -> code_review, nothing written" },
  { role: "verify", model: "slow", does: "answers bit by bit", outcome: "pass, implement -> code_review" },
  { role: "verify", model: "hang", does: "never answers", outcome: "skip harness_timeout", isEndless: true },
  { role: "orchestrate", model: "step-twice", does: "takes its one step, then a second", outcome: "pass, implement -> code_review, second command refused" },
  { role: "orchestrate", model: "approve", does: "approves the task", outcome: "pass, implement -> implement, command refused" },
];

/** A loop on TASK with a real agent, and the folder of this test. */
interface AgentLoop extends Disposable {
  readonly scratch: Scratch;
  /** Environment of the runner: the agent's settings and a mark that all processes below it carry. */
  readonly env: Readonly<Record<string, string>>;
  readonly mark: string;
  /** A folder that no session may write to. */
  readonly outside: string;
}

const SCRIPTED = { command: HARNESS };

/** Makes a loop with a preset, told about a model server, for one task. */
async function makeAgentLoop(
  name: AgentName,
  server: FakeModelServer,
  { phase = "implement", roles, harness = {}, models }: {
    phase?: string;
    roles: Readonly<Record<string, unknown>>;
    harness?: Readonly<Record<string, unknown>>;
    models: readonly string[];
  },
): Promise<AgentLoop> {
  const agent = AGENTS[name];
  assert("program" in agent);
  const scratch = makeScratch();
  const outside = join(scratch.dir, "outside");
  ensureDirSync(outside);
  makeRepository(scratch, scratch.project, {
    "README.md": "a project\n",
    ".gitignore": ".automaton/\n",
  });
  writeTask(scratch, TASK, phase);
  Deno.symlinkSync(agent.program, join(scratch.bin, name));
  const created = await runProgram(scratch, "status", [
    `--create-loop=${LOOP}`,
    "--from-template=ci-triage",
    `--harness=${name}`,
    `--task=${TASK}`,
  ]);
  assertEquals(created.code, 0, created.stderr);
  const path = join(loopDir(scratch, LOOP), "loop.json");
  const loop = readJson(path);
  const merged: Record<string, unknown> = {};
  for (const [role, own] of Object.entries(roles)) {
    const preset = (loop.roles as Record<string, object | null>)[role] ??
      readPresetRole(name, role);
    merged[role] = own === SCRIPTED ? own : { ...preset, ...own as object };
  }
  writeFile(
    path,
    JSON.stringify({
      ...loop,
      roles: { ...loop.roles as object, ...merged },
      harness: { ...loop.harness as object, timeout_seconds: TIMEOUT_S, ...harness },
    }),
  );
  const mark = crypto.randomUUID();
  const env = { ...SETTINGS[name](scratch, server.url, models), AUTOMATON_TEST_MARK: mark };
  return { scratch, env, mark, outside, [Symbol.dispose]: () => scratch[Symbol.dispose]() };
}

/** What a preset says of a role that the template leaves to the built-in orchestrator. */
function readPresetRole(name: AgentName, role: string): object {
  const preset = readJson(join(ROOT, "templates", "harnesses", `${name}.json`));
  return (preset.roles as Record<string, object>)[role] ?? {};
}

/** Writes an agent's own settings, so that it knows the model server and nothing else. */
const SETTINGS: Readonly<
  Record<
    AgentName,
    (scratch: Scratch, url: string, models: readonly string[]) => Record<string, string>
  >
> = {
  opencode(scratch, url, models) {
    const path = join(scratch.dir, "opencode.json");
    const limit = { context: 1_000_000, output: 4096 };
    const known = Object.fromEntries(models.map((model) => [model, { limit }]));
    writeFile(
      path,
      JSON.stringify({
        model: `fake/${models[0]}`,
        small_model: `fake/${models[0]}`,
        autoupdate: false,
        share: "disabled",
        enabled_providers: ["fake"],
        provider: {
          fake: {
            npm: "@ai-sdk/openai-compatible",
            options: { baseURL: url, apiKey: "sk-fake" },
            models: known,
          },
        },
      }),
    );
    const folders = ["CONFIG", "DATA", "CACHE", "STATE"].map((kind) => [
      `XDG_${kind}_HOME`,
      join(scratch.home, kind.toLowerCase()),
    ]);
    return {
      ...Object.fromEntries(folders),
      OPENCODE_CONFIG: path,
      OPENCODE_DISABLE_MODELS_FETCH: "1",
      npm_config_offline: "true",
    };
  },
  codex(scratch, url) {
    const home = join(scratch.dir, "codex");
    writeFile(
      join(home, "config.toml"),
      `model_provider = "fake"
check_for_update_on_startup = false
[model_providers.fake]
name = "fake"
base_url = "${url}"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
[sandbox_workspace_write]
# The tests' own folders lie there.
exclude_slash_tmp = true
exclude_tmpdir_env_var = true
`,
    );
    return { CODEX_HOME: home };
  },
};

/** A model's name as the agent wants it. */
const modelName = (name: AgentName, model: string) => name === "opencode" ? `fake/${model}` : model;

function runTick({ scratch, env }: AgentLoop): Promise<TickResult> {
  return tick(scratch, [], {
    env: { ...env, AUTOMATON_CONTEXT_TOKENS: "400000" },
    timeoutMs: 2 * TIMEOUT_S * 1000,
  });
}

/** Processes that a test's agents have left, zombies aside. */
function listLeftovers(mark: string): string {
  const script =
    'for p in $(grep -lsF -- "$1" /proc/[0-9]*/environ); do tr "\\0" " " <"${p%environ}cmdline"; echo; done';
  const { stdout } = new Deno.Command("sh", { args: ["-c", script, "sh", mark], clearEnv: true })
    .outputSync();
  return new TextDecoder().decode(stdout).trim();
}

/** The words with which an orchestrator's prompt has status called. */
function findCommand(prompt: string): string {
  return /^ {4}(.*) --transition PHASE/m.exec(prompt)?.[1] ?? "false";
}

/** Scenarios that need to know the loop's folders. */
function localScenarios(place: () => AgentLoop): Record<string, Scenario> {
  const [deno, script] = [Deno.execPath(), join(ROOT, "scripts/status.ts")].map(quoteShWord);
  const status = `${deno} run -q --no-prompt -P=status ${script}`;
  const write = (): Act => ({ write: join(place().outside, "outside.txt"), content: "outside\n" });
  return {
    "write-outside": (request) => steps([write()], "I wrote it.")(request),
    document: (request) => {
      const dir = taskDir(place().scratch, TASK);
      const acts: Act[] = [
        { run: `cat ${dir}/SPEC.md` },
        { write: join(dir, "IMPLEMENTATION.md"), content: "# By a tool\n" },
      ];
      return steps(acts, "I wrote it.")(request);
    },
    touch: (request) =>
      steps([{ write: "touched.txt", content: "by the verifier\n" }], verdictFor(request.prompt))(
        request,
      ),
    meddle: steps([
      { run: `${status} --transition code_review --task ${TASK}` },
      { run: "setsid sleep 1000 >/dev/null 2>&1 & echo started" },
    ], "Done."),
    "step-twice": (request) => {
      const step = {
        run: `${findCommand(request.prompt)} --transition code_review --task ${TASK}`,
      };
      // A step back from code_review is free, so that nothing but its being the second forbids it.
      return steps([step, { run: step.run.replace("code_review", "implement") }], "Moved.")(
        request,
      );
    },
    approve: (request) =>
      steps([{ run: `${findCommand(request.prompt)} --approve --task ${TASK}` }], "Approved.")(
        request,
      ),
  };
}

/** A tick's outcome in the words of the table, with what the scenario was about. */
function describeOutcome(
  { model }: Case,
  { json }: TickResult,
  { loop, server }: { loop: AgentLoop; server: FakeModelServer },
): string {
  if (json.skipped) return `skip ${json.reason}`;
  if (json.halt_reason !== null) return `halt ${json.halt_reason}`;
  const words = [json.verdict?.pass ? "pass" : "fail", `${json.phase} -> ${json.next_phase}`];
  const outputs = server.requests.at(-1)!.toolOutputs;
  const worktree = join(loopDir(loop.scratch, LOOP), "worktree");
  const branch = () =>
    git(loop.scratch, loop.scratch.project, "ls-tree", "--name-only", `loop/${LOOP}`);
  const isRefused = (output: string | undefined) => /Cannot (run|take)/.test(output ?? "");
  if (model === "write" && branch().includes("made.txt")) words.push("made.txt committed");
  if (model === "write-outside" && !existsSync(join(loop.outside, "outside.txt"))) {
    words.push("nothing written outside");
  }
  const document = join(taskDir(loop.scratch, TASK), "IMPLEMENTATION.md");
  if (
    model === "document" && outputs[0]!.includes("SPEC.md of") &&
    Deno.readTextFileSync(document) === "# By a tool\n"
  ) words.push("document written");
  if (model === "touch" && !existsSync(join(worktree, "touched.txt"))) {
    words.push("nothing written");
  }
  if (model === "meddle" && isRefused(outputs[0]) && outputs[1]!.includes("started")) {
    words.push("command refused");
  }
  if (model === "step-twice" && !isRefused(outputs[0]) && isRefused(outputs[1])) {
    words.push("second command refused");
  }
  if (model === "approve" && isRefused(outputs[0])) words.push("command refused");
  return words.join(", ");
}

/** Plays one case; throws when its outcome is not the one in the table. */
async function playCase(
  name: AgentName,
  each: Case,
  timeoutS = each.isEndless ? SHORT_TIMEOUT_S : TIMEOUT_S,
): Promise<void> {
  await using server = startFakeModelServer(localScenarios(() => loop));
  const roles = {
    implement: SCRIPTED,
    verify: SCRIPTED,
    ...(each.role === "orchestrate" ? { orchestrate: {} } : {}),
    [each.role]: { model: modelName(name, each.model) },
  };
  const harness = { timeout_seconds: timeoutS };
  using loop = await makeAgentLoop(name, server, { roles, models: [each.model], harness });
  const result = await runTick(loop);
  // Longer than this an agent may give up by itself.
  if (server.requests.length === 0 && timeoutS <= 30) {
    return await playCase(name, each, 2 * timeoutS);
  }
  const what = `${name}, ${each.role} ${each.model}: ${result.stdout}${result.stderr}`;
  const expected = typeof each.outcome === "string" ? each.outcome : each.outcome[name];
  assertEquals(describeOutcome(each, result, { loop, server }), expected, what);
  assertEquals(result.code, 0, what);
  assertEquals(listLeftovers(loop.mark), "", what);
  assert(server.requests.length > 0, what);
  const prompt = Deno.readTextFileSync(result.json.artifacts[`${each.role}_prompt`]!);
  assertEquals(server.requests[0]!.prompt, prompt, what);
  if (each.model === "step-twice" || each.model === "approve") {
    const refusals = readLog(loop.scratch, LOOP).filter(({ event }) => event === "REFUSED");
    assertEquals(refusals.length, 1, what);
  }
  if (expected === "skip backoff") {
    const { not_before, iteration_count, consecutive_failures } = readState(loop.scratch);
    assert(Date.parse(`${not_before}`) > Date.now(), what);
    assertEquals([iteration_count, consecutive_failures ?? 0], [0, 0], what);
  }
}

/** Plays cases: those that wait for a timeout all at once, the others two at a time meanwhile. */
async function playCases(name: AgentName, cases: readonly Case[]): Promise<void> {
  const failures: unknown[] = [];
  const play = (each: Case) =>
    playCase(name, each).catch((error) => {
      failures.push(error);
    });
  const waiting = cases.filter(({ isEndless }) => !isEndless);
  const worker = async () => {
    for (let each = waiting.shift(); each !== undefined; each = waiting.shift()) await play(each);
  };
  const endless = cases.filter(({ isEndless }) => isEndless).map(play);
  await Promise.all([worker(), worker(), ...endless]);
  if (failures.length > 0) throw new AggregateError(failures, failures.map(String).join("\n\n"));
}

for (const name of NAMES) {
  const agent = AGENTS[name];
  const ignore = "problem" in agent;
  const title = (text: string) => `${name}: ${text}${describeProblem(agent)}`;

  Deno.test({
    name: title("a loop runs to its end, and a hint arrives as it was given"),
    ignore,
    async fn() {
      const hint = 'Say "why": C:\\new\\table, `$HOME`, {current_task} & <b>50 %</b> – naïve 🙂';
      let reviews = 0;
      await using server = startFakeModelServer({
        // The first review fails with a hint, the others pass.
        review: ({ prompt }) => ({
          say: reviews++ === 0
            ? verdictFor(prompt, { pass: false, score: 0.2, next_hint: hint })
            : verdictFor(prompt),
        }),
      });
      using loop = await makeAgentLoop(name, server, {
        phase: "bug_hunt",
        models: ["write", "review"],
        roles: {
          implement: { model: modelName(name, "write") },
          verify: { model: modelName(name, "review") },
        },
      });
      const phases: string[] = [];
      for (let number = 1; number <= 2; number++) {
        const { json, stdout, stderr } = await runTick(loop);
        assertEquals(json.reason, null, stdout + stderr);
        phases.push(json.next_phase!);
      }
      assertEquals(phases, ["bug_hunt", "complete"]);
      assertEquals(readState(loop.scratch).status, "complete");
      assertEquals(readPhase(loop.scratch), "complete");

      // What the models were sent is what the runner wrote, byte for byte.
      const outputs = join(loopDir(loop.scratch, LOOP), "outputs");
      for (const [model, role] of [["write", "implement"], ["review", "verify"]] as const) {
        const sent = server.requests.filter((request) =>
          request.model === model && request.toolOutputs.length === 0
        );
        const written = [1, 2].map((number) =>
          Deno.readTextFileSync(join(outputs, `tick${number}-${role}-prompt.md`))
        );
        assertEquals(sent.map(({ prompt }) => prompt), written);
        assertEquals(written.map((prompt) => prompt.includes(hint)), [false, true]);
      }
      assertEquals(
        git(loop.scratch, loop.scratch.project, "show", `loop/${LOOP}:made.txt`),
        "made by a tool",
      );
      // The artifact and the diff of a tool's work reach the reviewer.
      assertStringIncludes(
        server.requests.find(({ model }) => model === "review")!.prompt,
        "+made by a tool",
      );
      const usage = readLog(loop.scratch, LOOP).filter(({ event }) => event === "USAGE");
      assertEquals(usage.map(({ role }) => role), ["implement", "verify", "implement", "verify"]);
      for (const { input_tokens, output_tokens } of usage) {
        assertNotEquals([input_tokens, output_tokens], [null, null]);
      }
      assertEquals(listLeftovers(loop.mark), "");
    },
  });

  Deno.test({
    name: title("every scenario has the outcome that the table gives, and leaves no process"),
    ignore,
    async fn() {
      // What the test before has shown need not be shown again by the slow one.
      const isShown = ({ model }: Case) => ["write", "verdict"].includes(model);
      await playCases(name, CASES.filter((each) => name !== "opencode" || !isShown(each)));
    },
  });

  Deno.test({
    name: title("a prompt of 300 kB reaches the model unchanged"),
    ignore,
    async fn() {
      await using server = startFakeModelServer();
      using loop = await makeAgentLoop(name, server, {
        models: ["answer"],
        roles: {
          implement: { model: modelName(name, "answer"), prompt: "big.md", tier: 90_000 },
          verify: SCRIPTED,
        },
      });
      const controls = Array.from({ length: 31 }, (_, i) => String.fromCharCode(i + 1)).join("");
      const line =
        `- "double" 'single' \\back\\slash \`tick\` $(echo no) %PATH% {none} é 漢字 🙂${controls}\u007f\r\n`;
      const prompt = line.repeat(Math.ceil(300_000 / new TextEncoder().encode(line).length));
      writeFile(join(loopDir(loop.scratch, LOOP), "big.md"), prompt);
      const { json, stdout, stderr } = await runTick(loop);
      assertEquals(json.reason, null, stdout + stderr);
      assert(new TextEncoder().encode(prompt).length >= 300_000);
      const [request] = server.requests;
      assert(request !== undefined);
      assert(request.prompt === prompt, `${request.prompt.length} of ${prompt.length} characters`);
    },
  });
}

Deno.test("the documents show the scenarios and outcomes that are tested", () => {
  const path = join(ROOT, "design", "loops", "technical.md");
  const text = Deno.readTextFileSync(path);
  const [begin, end] = ["<!-- begin: scenarios -->", "<!-- end: scenarios -->"];
  const [from, to] = [text.indexOf(begin) + begin.length, text.indexOf(end)];
  if (Deno.env.get("AUTOMATON_UPDATE_DOCS") === "1") {
    const table = `\n\n${renderTable()}\n\n`;
    return Deno.writeTextFileSync(path, text.slice(0, from) + table + text.slice(to));
  }
  const found = text.slice(from, to).trim();
  assertEquals(found, renderTable(), "AUTOMATON_UPDATE_DOCS=1 writes it anew");
});

/** The table as `deno fmt` lays it out. */
function renderTable(): string {
  const rows = [
    ["Session", "Its model", ...NAMES],
    ...CASES.map(({ role, does, outcome }) => [
      role,
      does,
      ...NAMES.map((name) => typeof outcome === "string" ? outcome : outcome[name]),
    ]),
  ];
  const widths = rows[0]!.map((_, column) => Math.max(...rows.map((row) => row[column]!.length)));
  const render = (row: readonly string[]) =>
    `| ${row.map((cell, column) => cell.padEnd(widths[column]!)).join(" | ")} |`;
  const rule = render(widths.map((width) => "-".repeat(width)));
  return [render(rows[0]!), rule, ...rows.slice(1).map(render)].join("\n");
}

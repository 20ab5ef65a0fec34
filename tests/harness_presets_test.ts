/** The presets of templates/harnesses, their schema, and `status --create-loop … --harness`. */
import { assert, assertEquals, assertStringIncludes } from "@std/assert";
import { join } from "@std/path";
import { parseLoopConfig } from "../scripts/status.ts";
import { Ajv2020 } from "./deps.ts";
import {
  lastJson,
  loopDir,
  makeScratch,
  readJson,
  ROOT,
  runProgram,
  type Scratch,
  writeFile,
} from "./helpers.ts";

const FOLDER = join(ROOT, "templates", "harnesses");
const PRESETS = [
  "aider",
  "claude",
  "cline",
  "codex",
  "copilot",
  "gemini",
  "opencode",
  "pi",
  "qwen",
];

const ajv = new Ajv2020({ strict: true, strictTuples: false, allErrors: true });
ajv.addFormat("regex", true);
ajv.addSchema(
  readJson(join(ROOT, "templates", "loops", "loop.schema.json")),
  "../loops/loop.schema.json",
);
const isPreset = ajv.compile(readJson(join(FOLDER, "harness.schema.json")));

/** What a preset's file says of its commands, for the role that runs them. */
interface Preset {
  readonly checked: string;
  readonly harness: {
    readonly command: readonly string[];
    readonly model_args: readonly string[];
    readonly stdin?: string;
    readonly env?: Readonly<Record<string, string>>;
    readonly usage?: unknown;
  };
  readonly roles: Readonly<
    Record<string, { command?: readonly string[]; env?: Record<string, string> }>
  >;
}

function readPreset(name: string): Preset {
  return readJson(join(FOLDER, `${name}.json`)) as unknown as Preset;
}

function createLoop(scratch: Scratch, ...args: string[]) {
  return runProgram(scratch, "status", [
    "--create-loop=night",
    ...args,
    "--project",
    scratch.project,
    "--json",
  ]);
}

Deno.test("the presets are those that the documents name", () => {
  const files = [...Deno.readDirSync(FOLDER)].map(({ name }) => name).sort();
  assertEquals(files, [...PRESETS.map((name) => `${name}.json`), "harness.schema.json"].sort());
});

Deno.test("the preset schema refuses what is no preset", () => {
  const good = readJson(join(FOLDER, "codex.json"));
  assert(isPreset(good), ajv.errorsText(isPreset.errors));
  const damaged: Record<string, unknown>[] = [
    { ...good, surprise: 1 },
    { ...good, description: "" },
    { ...good, checked: "looks right" },
    { ...good, harness: { ...good.harness as object, command: "codex exec" } },
    { ...good, harness: { ...good.harness as object, comand: ["codex"] } },
    { ...good, roles: { verifier: { command: ["codex"] } } },
    { ...good, roles: { verify: {} } },
    { ...good, roles: { verify: { prompt: "loop-verifier.md" } } },
  ];
  for (const preset of damaged) assert(!isPreset(preset), JSON.stringify(preset));
});

for (const name of PRESETS) {
  Deno.test(`preset ${name} satisfies its schema and keeps to what a loop needs`, () => {
    const preset = readPreset(name);
    assert(isPreset(preset), ajv.errorsText(isPreset.errors));
    const { harness, roles } = preset;
    const commands = [harness, ...Object.values(roles)].flatMap(({ command }) =>
      command === undefined ? [] : [command]
    );
    for (const command of commands) {
      assertEquals(command[0], name, "found by name, on PATH");
      // A model that is not known must not reach the program as the word {model}.
      assert(!command.some((word) => word.includes("{model}")), command.join(" "));
      const takesPrompt = harness.stdin === "prompt" ||
        command.some((word) => word === "{prompt}" || word === "{prompt_content}");
      assert(takesPrompt, `${command.join(" ")} gets no prompt`);
    }
    assert(harness.model_args.includes("{model}"));
    const verify = roles.verify;
    assert(verify?.command ?? verify?.env, "verify is held to reading in some way of its own");
  });
}

Deno.test("no preset gives a program all permissions where it has finer ones", () => {
  const broad =
    /dangerously|bypassPermissions|danger-full-access|--allow-all$|--allow-all-paths|^--yolo$|--auto$/;
  for (const name of PRESETS) {
    const { harness, roles } = readPreset(name);
    for (const { command } of [harness, ...Object.values(roles)]) {
      for (const word of command ?? []) assert(!broad.test(word), `${name}: ${word}`);
    }
  }
});

Deno.test("--harness writes each preset into the new loop.json, which then is valid", async (t) => {
  using scratch = makeScratch();
  for (const name of PRESETS) {
    await t.step(name, async () => {
      const preset = readPreset(name);
      const result = await createLoop(scratch, "--from-template=ci-triage", `--harness=${name}`);
      assertEquals(result.code, 0, result.stderr);
      assertEquals(lastJson(result).harness, name);
      const path = join(loopDir(scratch, "night"), "loop.json");
      const { config, warnings } = parseLoopConfig(Deno.readTextFileSync(path), path);
      assertEquals(warnings, []);
      assertEquals(config.harness, preset.harness as typeof config.harness);
      assertEquals(config.roles?.verify, {
        prompt: "loop-verifier.md",
        tier: 16000,
        ...preset.roles.verify,
      });
      assertEquals(config.roles?.orchestrate, null, "the template's built-in orchestrator stays");
      Deno.removeSync(loopDir(scratch, "night"), { recursive: true });
    });
  }
});

Deno.test("--harness drops the template's own agent but keeps its time limits, prompts and tiers", async () => {
  using scratch = makeScratch();
  const result = await createLoop(scratch, "--from-template=demo", "--harness=codex");
  assertEquals(result.code, 0, result.stderr);
  const demo = readJson(join(ROOT, "templates", "loops", "demo", "loop.json"));
  const loop = readJson(join(loopDir(scratch, "night"), "loop.json"));
  const { harness, roles } = readPreset("codex");
  const limits = Object.entries(demo.harness as object).filter(([key]) => key.endsWith("_seconds"));
  assert(limits.length > 0, "the demo has a time limit to keep");
  assertEquals(loop.harness, { ...Object.fromEntries(limits), ...harness });
  const demoRoles = demo.roles as Record<string, object>;
  assertEquals(loop.roles, {
    implement: demoRoles.implement,
    verify: { ...demoRoles.verify, ...roles.verify },
    orchestrate: { ...demoRoles.orchestrate, ...roles.orchestrate },
  });
});

Deno.test("--harness tells what a person should know of the preset, on stderr", async () => {
  using scratch = makeScratch();
  const { stderr } = await createLoop(scratch, "--from-template=ci-triage", "--harness=pi");
  assertStringIncludes(stderr, "note: It knows no permissions");
});

Deno.test("--harness refuses a preset that is not there and names those that are", async () => {
  using scratch = makeScratch();
  for (const name of ["nobody", "harness", "../loops/demo/loop", "harness.schema"]) {
    const result = await createLoop(scratch, "--from-template=demo", `--harness=${name}`);
    assertEquals(result.code === 0, false, name);
    assert(!result.stderr.includes("    at "), result.stderr);
    assertEquals(
      [...Deno.readDirSync(join(scratch.project, ".automaton"))].map(({ name }) => name),
      [],
    );
  }
  const { stderr } = await createLoop(scratch, "--from-template=demo", "--harness=nobody");
  assertStringIncludes(stderr, `presets there: ${PRESETS.join(", ")}`);
});

Deno.test("--harness refuses a damaged preset, naming its file and field, and makes nothing", async () => {
  using scratch = makeScratch();
  const framework = join(scratch.dir, "framework");
  for (const path of ["templates/loops/ci-triage/loop.json", "config.md"]) {
    writeFile(join(framework, path), Deno.readTextFileSync(join(ROOT, path)));
  }
  const damaged: [string, string][] = [
    ["{", "Cannot parse"],
    ["[]", "wanted an object"],
    ["{}", "field harness: found nothing"],
    ['{"harness":{"command":"agent"}}', "field harness.command"],
    ['{"harness":{"command":["agent"]},"roles":{"verify":{"tier":1}}}', "roles.verify.tier"],
    ['{"harness":{"command":["agent"]},"roles":{"verify":7}}', "field roles.verify"],
  ];
  for (const [text, words] of damaged) {
    writeFile(join(framework, "templates", "harnesses", "bad.json"), text);
    const { code, stderr } = await runProgram(scratch, "status", [
      "--create-loop=night",
      "--from-template=ci-triage",
      "--harness=bad",
      "--project",
      scratch.project,
    ], { env: { AUTOMATON_HOME: framework } });
    assertEquals(code, 1, text);
    assertStringIncludes(stderr, words);
    assertStringIncludes(stderr, "bad.json");
    assertEquals([...Deno.readDirSync(join(scratch.project, ".automaton"))], []);
  }
});

/** Loop templates, their JSON Schema, the prompts, and the examples of the harness contract. */
import { assert, assertEquals, assertStringIncludes } from "@std/assert";
import { fromFileUrl } from "@std/path";
import { DEFAULT_HARNESS, fillPrompt, parseVerdict } from "../scripts/loop-runner.ts";
import { parseLoopConfig } from "../scripts/status.ts";
import { Ajv2020 } from "./deps.ts";

const ROOT = new URL("../", import.meta.url);
const TEMPLATES = ["ci-triage", "demo", "self-improvement"];

type Json = null | boolean | number | string | Json[] | { [key: string]: Json };
type JsonObject = { [key: string]: Json };

const schema = asObject(readJson("templates/loops/loop.schema.json"));
// Strict mode refuses keywords that the schema only seems to use. Only its rule that a list with a
// special first item must have a fixed length is off: the first word of a command is special.
const ajv = new Ajv2020({ strict: true, strictTuples: false, allErrors: true });
ajv.addFormat("regex", isRegularExpression);
const isValid = ajv.compile(schema);

/** Every field once, with a value that is right. Damaged examples change one thing in it. */
const FULL: JsonObject = {
  $schema: "loop.schema.json",
  name: "nightly",
  description: "Works at night",
  work_source: { kind: "backlog", project: "~/project", area: "loops" },
  roles: {
    implement: {
      prompt: "loop-implement.md",
      tier: 16000,
      model: "a",
      command: ["agent", ""],
      env: { A: "" },
    },
    verify: {
      prompt: "loop-verifier.md",
      tier: 8000,
      model: "b",
      command: ["agent"],
      env: { A: "1" },
    },
    orchestrate: {
      prompt: "loop-orchestrate.md",
      tier: 4000,
      model: "a",
      command: ["agent"],
      env: { A: "1" },
    },
  },
  brakes: {
    max_iterations: 1,
    max_budget_usd: 2.5,
    score_plateau_window: 2,
    max_consecutive_failures: 1,
  },
  blast_radius: {
    worktree: true,
    file_scope: ["src/", "a..b/c", ".", "pages/[id].ts"],
    base: "main",
    commit: "on_pass",
  },
  checks: [["deno", "test"]],
  acceptance_criteria: ["It works"],
  harness: {
    command: ["agent", "{prompt}"],
    model_args: ["--model", "{model}", ""],
    prompt_var: "{p}",
    cwd_var: "{c}",
    output_var: "{o}",
    stdin: "prompt",
    timeout_seconds: 60,
    idle_timeout_seconds: 0,
    env: { MODE: "" },
    unset_env: ["PARENT"],
    usage: {
      where: { "type": "end" },
      combine: "sum",
      cost_usd: "cost.total",
      input_tokens: "in",
      output_tokens: "out",
      text: "text.*.value",
      error: "error",
    },
    backoff: { patterns: ["429"], exit_codes: [75], seconds: 60 },
  },
  outputs: { retention: 0 },
  schedule: { kind: "native", interval_seconds: 60 },
  hooks: { on_halt: ["notify", "halted"], on_complete: ["notify"] },
  allowed_phases: ["implement"],
};

const ARGV_DAMAGE: Json[] = [[], [""], [1], ["agent", 1], "agent", null];
const ENV_DAMAGE: Json[] = [["A=b"], { "A=B": "c" }, { "": "c" }, null];
const FOLDER_DAMAGE: Json[] = ["/etc", "~/x", "C:/x", "..", "../x", "a/../b", "", 1];
const ROLE_DAMAGE: Record<string, Json[]> = {
  "": ["loop-implement.md", [], true],
  ".prompt": ["", 1, null],
  ".tier": [3999, 0, 4000.5, "16000", null],
  ".model": ["", 1, null],
  ".command": ARGV_DAMAGE,
  ".env": ENV_DAMAGE,
  ".env{}": [1, true, null],
};

/** Values that each field must refuse, by the path of the field. */
const DAMAGE: Record<string, Json[]> = {
  "$schema": [1],
  "name": ["", "Nightly", "-x", "a/b", "a b", "../a", "n".repeat(64), 1, null],
  "description": [1, null],
  "work_source": ["audit", [], null],
  "work_source.kind": ["audits", "", 1, null],
  "work_source.project": ["", 1],
  "work_source.area": FOLDER_DAMAGE,
  "roles": [[], null],
  ...forRole("implement"),
  ...forRole("verify"),
  ...forRole("orchestrate"),
  "brakes": [[], null],
  "brakes.max_iterations": [0, -1, 1.5, "10", null],
  "brakes.max_budget_usd": [-0.01, "5", true],
  "brakes.score_plateau_window": [1, 0, 2.5, "3", null],
  "brakes.max_consecutive_failures": [0, 1.5, "3", null],
  "blast_radius": [[], null],
  "blast_radius.worktree": ["true", 1, null],
  "blast_radius.file_scope": ["src/", null, {}],
  "blast_radius.file_scope[]": FOLDER_DAMAGE,
  "blast_radius.base": ["", "--upload-pack=x", 1, null],
  "blast_radius.commit": ["on-pass", true, null],
  "checks": ["deno test", null],
  "checks[]": ARGV_DAMAGE,
  "acceptance_criteria": [1, null, {}],
  "acceptance_criteria[]": ["", 1],
  "harness": [["agent"], "agent", null],
  "harness.command": ARGV_DAMAGE,
  "harness.model_args": ["-m {model}", {}, null],
  "harness.model_args[]": [1, null],
  "harness.prompt_var": ["", 1],
  "harness.cwd_var": ["", 1],
  "harness.output_var": ["", 1],
  "harness.stdin": ["file", "", true, null],
  "harness.timeout_seconds": [-1, "60", null],
  "harness.idle_timeout_seconds": [-1, "60", null],
  "harness.env": ENV_DAMAGE,
  "harness.env{}": [1, true, null],
  "harness.unset_env": ["PARENT", null],
  "harness.unset_env[]": ["", "A=b", 1],
  "harness.usage": [true, [], null],
  "harness.usage.where": ["type=end", [], null],
  "harness.usage.where{}": [1, true, null],
  "harness.usage.combine": ["mean", "", null],
  "harness.usage.cost_usd": ["", 1, null],
  "harness.usage.input_tokens": ["", 1, null],
  "harness.usage.output_tokens": ["", 1, null],
  "harness.usage.text": ["", 1, null],
  "harness.usage.error": ["", 1, null],
  "harness.backoff": [60, [], null],
  "harness.backoff.patterns": ["429", null],
  "harness.backoff.patterns[]": ["", "(", 429],
  "harness.backoff.exit_codes": [75, null],
  "harness.backoff.exit_codes[]": [0, 1.5, "75"],
  "harness.backoff.seconds": [0.5, -1, "60", null],
  "outputs": [20, [], null],
  "outputs.retention": [-1, 0.5, "20", null],
  "schedule": [3600, [], null],
  "schedule.kind": ["daemon", "", 1],
  "schedule.interval_seconds": [0, -60, 1.5, "3600", null],
  "hooks": [["notify"], null],
  "hooks.on_halt": ARGV_DAMAGE,
  "hooks.on_complete": ARGV_DAMAGE,
  "allowed_phases": ["implement", null, ["implement", "implement"]],
  "allowed_phases[]": ["complete", "human_intervention", "review", 1],
};

/** Damage that the programs do not refuse: they read it as the default, warn, or notice it later. */
const TOLERATED = new Map<string, (value: Json) => boolean>([
  ["work_source.kind", (value) => typeof value === "string"],
  ["work_source.area", (value) => value === "~/x"],
  ["blast_radius.file_scope[]", (value) => value === "~/x"],
  ["acceptance_criteria[]", (value) => value === ""],
  ["harness.backoff.patterns[]", (value) => value === ""],
  ["harness.backoff.exit_codes[]", (value) => value === 0],
  ["outputs.retention", (value) => value === -1],
  ["schedule.kind", (value) => typeof value === "string"],
  ["allowed_phases", Array.isArray],
  ["allowed_phases[]", (value) => value === "complete" || value === "human_intervention"],
]);

/** What the runner fills in (design/loops/technical.md, prompts). */
const PROMPT_TOKENS = new Set([
  "loop_name",
  "task_brief",
  "acceptance_criteria",
  "next_hint",
  "current_task",
  "current_phase",
  "verdict",
  "artifact_content",
  "check_results",
  "diff",
  "verdict_nonce",
  "task_dir",
  "phase_document",
  "status_command",
]);

Deno.test("the loop schema is a valid JSON Schema of draft 2020-12", () => {
  assertEquals(schema.$schema, "https://json-schema.org/draft/2020-12/schema");
  assert(ajv.validateSchema(schema), ajv.errorsText(ajv.errors));
});

Deno.test("the loop schema describes every field", () => {
  for (const [path, field] of schemaFields()) {
    if (path.endsWith("[]") || path.endsWith("{}")) continue;
    assert(typeof field.description === "string", `${path} has no description`);
  }
});

Deno.test("the loop schema's defaults satisfy it", () => {
  for (const [path, field] of schemaFields()) {
    if (field.default === undefined) continue;
    assertAccepted(withValue(FULL, path, field.default), `default of ${path}`);
  }
});

Deno.test("the loop schema accepts a loop with every field, and one with a name alone", () => {
  assertAccepted(FULL, "the full example");
  assertAccepted({ name: "a" }, "a name alone");
  for (const [path] of schemaFields()) valueAt(FULL, path);
});

Deno.test("the loop schema accepts null where it means a default or no limit", () => {
  for (
    const path of ["roles.implement", "roles.verify", "roles.orchestrate", "brakes.max_budget_usd"]
  ) {
    assertAccepted(withValue(FULL, path, null), path);
  }
  assertAccepted(withValue(FULL, "acceptance_criteria", "one text"), "criteria as a text");
});

Deno.test("the loop schema refuses damaged values of every field", async (t) => {
  assertEquals(Object.keys(DAMAGE).sort(), schemaFields().map(([path]) => path).sort());
  for (const [path, values] of Object.entries(DAMAGE)) {
    await t.step(path, () => {
      for (const value of values) {
        assert(!isValid(withValue(FULL, path, value)), `${JSON.stringify(value)} was accepted`);
      }
    });
  }
});

Deno.test("the programs know every field of the schema and accept its defaults", () => {
  assertEquals(programsRefuse(FULL), null);
  for (const [path, field] of schemaFields()) {
    if (field.default === undefined) continue;
    assertEquals(programsRefuse(withValue(FULL, path, field.default)), null, path);
  }
});

Deno.test("the programs refuse what the schema refuses, but for what they tolerate", async (t) => {
  for (const [path, values] of Object.entries(DAMAGE)) {
    await t.step(path, () => {
      for (const value of values) {
        const refusal = programsRefuse(withValue(FULL, path, value));
        const isTolerated = TOLERATED.get(path)?.(value) ?? false;
        assertEquals(refusal === null, isTolerated, `${JSON.stringify(value)}: ${refusal}`);
      }
    });
  }
});

Deno.test("the loop schema refuses a loop without a name", () => {
  const { name: _, ...nameless } = FULL;
  assert(!isValid(nameless));
});

Deno.test("the loop schema refuses unknown keys at every level", () => {
  for (const path of ["", ...schemaFields().map(([path]) => path)]) {
    const value = path === "" ? FULL : valueAt(FULL, path);
    const hasFreeKeys = path.endsWith(".env") || path === "harness.usage.where";
    if (!isObject(value) || hasFreeKeys) continue;
    const grown = { ...value, surprise: 1 };
    assert(!isValid(path === "" ? grown : withValue(FULL, path, grown)), path || "top level");
  }
});

Deno.test("the templates are those that the documents name", () => {
  const folders = [...Deno.readDirSync(new URL("templates/loops/", ROOT))]
    .filter((entry) => entry.isDirectory).map((entry) => entry.name);
  assertEquals(folders.sort(), TEMPLATES);
});

for (const name of TEMPLATES) {
  Deno.test(`template ${name} satisfies the schema and points to what is there`, () => {
    const loop = asObject(readJson(`templates/loops/${name}/loop.json`));
    assertAccepted(loop, name);
    assertEquals(loop.name, name);
    assertEquals(loop.$schema, "../loop.schema.json");
    for (const role of Object.values(asObject(loop.roles))) {
      if (role !== null) Deno.statSync(new URL(`prompts/${asObject(role).prompt}`, ROOT));
    }
    assert(asArray(loop.acceptance_criteria).length > 0);
    assertEquals(asObject(loop.blast_radius).worktree, true);
  });
}

Deno.test("the default harness is the one that the schema and the templates show", () => {
  const expected = DEFAULT_HARNESS as unknown as Json;
  assertEquals(asObject(asObject(schema.properties).harness).default, expected);
  assertEquals(asObject(readJson("templates/loops/ci-triage/loop.json")).harness, expected);
});

Deno.test("template ci-triage works on a single task with the built-in orchestrator", () => {
  const loop = asObject(readJson("templates/loops/ci-triage/loop.json"));
  assertEquals(loop.work_source, { kind: "single" });
  assertEquals(asObject(loop.roles).orchestrate, null);
});

Deno.test("template self-improvement audits the framework with the default harness", () => {
  const loop = asObject(readJson("templates/loops/self-improvement/loop.json"));
  assertEquals(loop.work_source, { kind: "audit", project: "{framework}" });
  const roles = asObject(loop.roles);
  const tiers = Object.entries(roles).map(([role, it]) => [role, asObject(it).tier]);
  assertEquals(tiers, [["implement", 16000], ["verify", 8000], ["orchestrate", 4000]]);
  assertEquals(asObject(loop.blast_radius).file_scope, [
    "scripts/",
    "prompts/",
    "tests/",
    "design/",
  ]);
  assertEquals(loop.harness, DEFAULT_HARNESS as unknown as Json);
  assertEquals(asObject(loop.schedule).interval_seconds, 3600);
});

for (const file of ["loop-implement.md", "loop-verifier.md", "loop-orchestrate.md"]) {
  Deno.test(`prompt ${file} holds only tokens that are filled in, and is short`, () => {
    const text = readPrompt(file);
    for (const [, token] of text.matchAll(/\{([a-z_]+)\}/g)) {
      assert(PROMPT_TOKENS.has(token!), `{${token}} stays as it is`);
    }
    // A quarter of the smallest tier (4000 tokens of 4 characters) leaves room for what is filled in.
    assert(text.length < 4000, `${text.length} characters`);
  });
}

Deno.test("the prompts carry what each role needs", () => {
  const needs = {
    "loop-implement.md": ["task_brief", "next_hint", "acceptance_criteria", "phase_document"],
    "loop-verifier.md": ["artifact_content", "diff", "check_results", "verdict_nonce", "next_hint"],
    "loop-orchestrate.md": ["verdict", "status_command", "current_phase", "current_task"],
  };
  for (const [file, tokens] of Object.entries(needs)) {
    for (const token of tokens) assertStringIncludes(readPrompt(file), `{${token}}`);
  }
});

Deno.test("the verifier's prompt names every key of a verdict", () => {
  for (const key of ["pass", "score", "reasons", "next_hint", "nonce"]) {
    assertStringIncludes(readPrompt("loop-verifier.md"), `- ${key}: `);
  }
});

Deno.test("a verifier that only repeats its prompt gives no verdict", () => {
  const values = Object.fromEntries([...PROMPT_TOKENS].map((token) => [`{${token}}`, "a text"]));
  const prompt = fillPrompt(readPrompt("loop-verifier.md"), values, 8000);
  assertEquals(parseVerdict(prompt, "a text").verdict, null);
  assert(!prompt.includes("{"), "nothing in it looks like an object");
});

Deno.test("the orchestrator's prompt names the next step of every phase", () => {
  const steps = readPrompt("loop-orchestrate.md").matchAll(/^- ([a-z_]+) -> ([a-z_]+)/gm);
  assertEquals(Object.fromEntries([...steps].map(([, from, to]) => [from, to])), {
    research: "design",
    design: "spec",
    spec: "human_intervention",
    implement: "code_review",
    code_review: "bug_hunt",
    bug_hunt: "complete",
  });
});

Deno.test("the harness contract's example of a verifier answers the verifier's prompt", async () => {
  const contract = Deno.readTextFileSync(new URL("contracts/harness-integration.md", ROOT));
  const example = contract.slice(contract.indexOf("    #!/bin/sh")).replaceAll(/^ {4}/gm, "");
  const prompt = readPrompt("loop-verifier.md").replaceAll("{verdict_nonce}", "c0ffee");
  const child = new Deno.Command("sh", { args: ["-c", example], stdin: "piped", stdout: "piped" })
    .spawn();
  const writer = child.stdin.getWriter();
  await writer.write(new TextEncoder().encode(prompt));
  await writer.close();
  const { stdout } = await child.output();
  assertEquals(JSON.parse(new TextDecoder().decode(stdout)), {
    pass: true,
    score: 1,
    reasons: [],
    next_hint: "",
    nonce: "c0ffee",
  });
});

Deno.test("the harness contract's harness examples satisfy the schema", () => {
  const contract = Deno.readTextFileSync(new URL("contracts/harness-integration.md", ROOT));
  const examples = [...contract.matchAll(/^ {4}("harness": .*)$/gm)];
  assert(examples.length > 1);
  for (const [, example] of examples) {
    assertAccepted(JSON.parse(`{"name":"a",${example}}`), String(example));
  }
});

function isRegularExpression(text: string): boolean {
  try {
    return new RegExp(text) instanceof RegExp;
  } catch {
    return false;
  }
}

/** What the programs find wrong with a loop.json, warnings included; null when nothing. */
function programsRefuse(loop: Json): string | null {
  try {
    const { warnings } = parseLoopConfig(JSON.stringify(loop), "loop.json");
    return warnings[0] ?? null;
  } catch (error) {
    return String(error);
  }
}

function forRole(role: string): Record<string, Json[]> {
  return Object.fromEntries(
    Object.entries(ROLE_DAMAGE).map(([path, values]) => [`roles.${role}${path}`, values]),
  );
}

function readPrompt(file: string): string {
  return Deno.readTextFileSync(new URL(`prompts/${file}`, ROOT));
}

function readJson(path: string): Json {
  return JSON.parse(Deno.readTextFileSync(fromFileUrl(new URL(path, ROOT))));
}

function isObject(value: Json | undefined): value is JsonObject {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function asObject(value: Json | undefined): JsonObject {
  assert(isObject(value), `not an object: ${JSON.stringify(value)}`);
  return value;
}

function asArray(value: Json | undefined): Json[] {
  assert(Array.isArray(value), `not a list: ${JSON.stringify(value)}`);
  return value;
}

function assertAccepted(value: Json, what: string): void {
  assert(isValid(value), `${what}: ${ajv.errorsText(isValid.errors)}`);
}

/** Every field of the schema by its path: `a.b`, `a[]` for items, `a{}` for values of free keys. */
function schemaFields(): [string, JsonObject][] {
  return Object.entries(asObject(schema.properties))
    .flatMap(([name, field]) => fieldsBelow(name, asObject(field)));
}

function fieldsBelow(path: string, field: JsonObject): [string, JsonObject][] {
  const fields: [string, JsonObject][] = [[path, field]];
  for (const shape of shapesOf(field)) {
    for (const [name, child] of Object.entries(asObject(shape.properties ?? {}))) {
      fields.push(...fieldsBelow(`${path}.${name}`, asObject(child)));
    }
    // The words of an argv are covered by the argv itself.
    if (isObject(shape.items) && shape !== argvShape()) {
      fields.push([`${path}[]`, shape.items]);
    }
    if (isObject(shape.additionalProperties)) {
      fields.push([`${path}{}`, shape.additionalProperties]);
    }
  }
  return fields;
}

function argvShape(): JsonObject {
  return asObject(asObject(schema.$defs).argv);
}

/** The alternatives that a field may be, references followed. */
function shapesOf(field: JsonObject): JsonObject[] {
  if (typeof field.$ref === "string") {
    return shapesOf(asObject(asObject(schema.$defs)[field.$ref.replace("#/$defs/", "")]));
  }
  return field.anyOf === undefined
    ? [field]
    : asArray(field.anyOf).flatMap((it) => shapesOf(asObject(it)));
}

/** Splits `a.b[]` into `a`, `b`, `[]`. */
function steps(path: string): string[] {
  return path.replaceAll(/(\[\]|\{\})/g, ".$1").split(".");
}

function keyFor(parent: Json, step: string): string {
  return step === "[]" ? "0" : step === "{}" ? Object.keys(asObject(parent))[0]! : step;
}

function valueAt(root: Json, path: string): Json {
  let value = root;
  for (const step of steps(path)) {
    const key = keyFor(value, step);
    const next = Array.isArray(value) ? value[Number(key)] : asObject(value)[key];
    assert(next !== undefined, `the full example has no ${path}`);
    value = next;
  }
  return value;
}

/** A copy of `root` with the field at `path` replaced. */
function withValue(root: Json, path: string, value: Json): Json {
  const [last, ...before] = steps(path).reverse();
  const copy = structuredClone(root);
  const parent = before.length === 0 ? copy : valueAt(copy, before.reverse().join("."));
  const key = keyFor(parent, last!);
  if (Array.isArray(parent)) parent[Number(key)] = value;
  else asObject(parent)[key] = value;
  return copy;
}

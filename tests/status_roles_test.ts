/** status: what a harness may do in each role. */
import { assert, assertEquals, assertStringIncludes } from "@std/assert";
import { existsSync } from "@std/fs";
import { join } from "@std/path";
import { COMMANDS } from "../scripts/status.ts";
import {
  makeScratch,
  readJson,
  readLog,
  type Scratch,
  snapshot,
  taskDir,
  writeFile,
  writeLoop,
  writeTask,
} from "./helpers.ts";
import { accept, refuse, status } from "./status_support.ts";

/** One command line for each command, each of which a person could run. */
const LINES: Readonly<Record<string, readonly string[]>> = {
  "create-task": ["--create-task=new"],
  transition: ["--transition=code_review", "--task=mine"],
  approve: ["--approve", "--task=spec"],
  claim: ["--claim", "--task=mine", "--session=me"],
  release: ["--release", "--task=other"],
  "can-edit": ["--can-edit", "--task=mine"],
  "scope-check": ["--scope-check", "--loop=night"],
  audit: ["--audit"],
  "create-loop": ["--create-loop=second", "--from-template=ci-triage"],
  "remove-loop": ["--remove-loop=night"],
  "pause-loop": ["--pause-loop=night"],
  "resume-loop": ["--resume-loop=night"],
  "halt-loop": ["--halt-loop=night", "--reason=human_intervention"],
  "can-continue": ["--can-continue=night"],
  "check-gate": ["--check-gate=night"],
  "claim-loop-task": ["--claim-loop-task=night", "--task=other"],
  "loop-list": ["--loop-list"],
  "loop-log": ["--loop-log=night"],
  "install-schedule": ["--install-schedule=night", "--scheduler=cron", "--dry-run"],
  "uninstall-schedule": ["--uninstall-schedule=night"],
  doctor: ["--doctor"],
  task: ["--task=mine"],
};

const READING = [
  "can-edit",
  "scope-check",
  "audit",
  "can-continue",
  "loop-list",
  "loop-log",
  "task",
  "doctor",
];

/** A project with a loop at work on the task "mine", which may go on to code_review. */
function prepare(scratch: Scratch): void {
  writeTask(scratch, "mine", "implement", { loop: "night" });
  writeFile(join(taskDir(scratch, "mine"), "IMPLEMENTATION.md"), "x");
  writeTask(scratch, "other", "implement");
  writeTask(scratch, "spec", "spec");
  writeFile(join(taskDir(scratch, "spec"), "SPEC.md"), "x");
  writeLoop(scratch, "night", {}, { current_task: "mine" });
}

/** The environment that a tick gives its harness. */
function environment(scratch: Scratch, role: string): Record<string, string> {
  return {
    AUTOMATON_PROJECT: scratch.project,
    AUTOMATON_LOOP: "night",
    AUTOMATON_ROLE: role,
    AUTOMATON_TASK: "mine",
    ...(role === "orchestrate" ? { AUTOMATON_OP_FILE: join(scratch.dir, "op") } : {}),
  };
}

/** What of the project is not the log of refusals. */
function withoutLog(scratch: Scratch): Record<string, string> {
  return snapshot(scratch.project, [".automaton/loops/night/.state.log"]);
}

Deno.test("the table of this test names every command", () => {
  assertEquals(Object.keys(LINES).sort(), COMMANDS.map(({ name }) => name).sort());
  assertEquals(
    COMMANDS.filter(({ writes }) => !writes).map(({ name }) => name).sort(),
    READING.toSorted(),
  );
});

for (const role of ["implement", "verify", "orchestrate", "stranger"]) {
  Deno.test(`a session in the role ${role} may read, and change nothing it should not`, async (t) => {
    using scratch = makeScratch();
    prepare(scratch);
    const env = environment(scratch, role);
    const before = withoutLog(scratch);
    let refused = 0;
    for (const [name, args] of Object.entries(LINES)) {
      if (role === "orchestrate" && name === "transition") continue;
      if (READING.includes(name)) {
        await t.step(`it may run --${name}`, async () => {
          const { code, stderr } = await status(scratch, args, { env });
          assert(!stderr.includes("Cannot run"), stderr);
          if (name !== "doctor") assertEquals(code, 0, "a doctor may find something");
        });
        continue;
      }
      await t.step(`it may not run --${name}`, async () => {
        await refuse(scratch, args, new RegExp(`Cannot run "--${name}" as loop:night/${role}`), {
          env,
        });
        refused++;
        const { event, level, by, message } = readLog(scratch, "night").at(-1)!;
        assertEquals([event, level, by], ["REFUSED", "WARNING", `loop:night/${role}`]);
        assertStringIncludes(`${message}`, `--${name}`);
      });
    }
    assertEquals(readLog(scratch, "night").length, refused);
    assertEquals(withoutLog(scratch), before);
  });
}

Deno.test("an orchestrator takes one step a tick, and a second one is refused and logged", async (t) => {
  using scratch = makeScratch();
  prepare(scratch);
  const env = environment(scratch, "orchestrate");
  const opFile = env.AUTOMATON_OP_FILE!;
  await t.step("a step that is refused does not use up the tick's command", async () => {
    await refuse(scratch, ["--transition=complete", "--task=mine"], /next phase is code_review/, {
      env,
    });
    assert(!existsSync(opFile));
  });
  await t.step("the first one is taken", async () => {
    await accept(scratch, LINES.transition!, { env });
    assert(existsSync(opFile));
    const { phase, history } = readJson(join(taskDir(scratch, "mine"), ".state"));
    assertEquals(phase, "code_review");
    const step = (history as Record<string, unknown>[]).at(-1)!;
    assertEquals(step.by, "loop:night/orchestrate");
  });
  await t.step("the second one is not", async () => {
    const back = ["--transition=implement", "--task=mine"];
    await refuse(scratch, back, /Cannot take a second step/, { env });
    assertEquals(readJson(join(taskDir(scratch, "mine"), ".state")).phase, "code_review");
    const { event, message } = readLog(scratch, "night").at(-1)!;
    assertEquals(event, "REFUSED");
    assertStringIncludes(`${message}`, "second step");
  });
});

Deno.test("an orchestrator may ask for a person instead", async () => {
  using scratch = makeScratch();
  prepare(scratch);
  const env = environment(scratch, "orchestrate");
  const args = ["--transition=human_intervention", "--task=mine", "--reason=which one?"];
  await accept(scratch, args, { env });
  assert(existsSync(env.AUTOMATON_OP_FILE!));
});

Deno.test("of an orchestrator's steps at once exactly one is taken", async () => {
  using scratch = makeScratch();
  prepare(scratch);
  const env = environment(scratch, "orchestrate");
  const steps = [
    ["--transition=code_review", "--task=mine"],
    ["--transition=human_intervention", "--task=mine", "--reason=a"],
    ["--transition=spec", "--task=mine", "--reason=b"],
    ["--transition=design", "--task=mine", "--reason=c"],
  ];
  const results = await Promise.all(steps.map((args) => status(scratch, args, { env })));
  assertEquals(results.filter(({ code }) => code === 0).length, 1);
  const { history } = readJson(join(taskDir(scratch, "mine"), ".state"));
  const made = (history as Record<string, unknown>[]).filter(({ by }) => by !== "person");
  assertEquals(made.length, 1);
});

Deno.test("an orchestrator moves its own task in its own project, by a tick", async (t) => {
  using scratch = makeScratch();
  prepare(scratch);
  writeFile(join(taskDir(scratch, "other"), "IMPLEMENTATION.md"), "x");
  const env = environment(scratch, "orchestrate");
  const before = withoutLog(scratch);
  await t.step(
    "not another task",
    () =>
      refuse(scratch, ["--transition=code_review", "--task=other"], /may run one .* --task mine/, {
        env,
      }),
  );
  await t.step("not the task of that name elsewhere", async () => {
    using elsewhere = makeScratch();
    prepare(elsewhere);
    const args = [...LINES.transition!, `--project=${elsewhere.project}`];
    await refuse(scratch, args, /may run one --transition/, { env });
  });
  await t.step("not without the file that counts its steps", () => {
    const { AUTOMATON_OP_FILE: _, ...rest } = env;
    return refuse(scratch, LINES.transition!, /AUTOMATON_OP_FILE is not set/, { env: rest });
  });
  assertEquals(withoutLog(scratch), {
    ...before,
    ".automaton/tasks/mine/.state.lock": "",
  });
});

Deno.test("only a person approves: neither a session nor the tick itself", async () => {
  using scratch = makeScratch();
  prepare(scratch);
  writeLoop(scratch, "tired", {}, { status: "halted", halt_reason: "verifier_failed" });
  const before = withoutLog(scratch);
  for (const target of ["--task=spec", "--loop=tired"]) {
    await refuse(scratch, ["--approve", target], /as loop:night: only a person approves/, {
      env: { AUTOMATON_LOOP: "night" },
    });
    await refuse(scratch, ["--approve", target], /only a person approves/, {
      env: { AUTOMATON_ROLE: "orchestrate" },
    });
  }
  assertEquals(withoutLog(scratch), before);
});

Deno.test("a refusal is one also where it cannot be logged", async () => {
  using scratch = makeScratch();
  prepare(scratch);
  const env = { ...environment(scratch, "verify"), AUTOMATON_LOOP: "../../elsewhere" };
  await refuse(scratch, LINES.claim!, /the role verify may change nothing/, { env });
  assertEquals(readLog(scratch, "night"), []);
});

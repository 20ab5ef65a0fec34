/** status: tasks, their phases, approval, history and claims. */
import { assert, assertEquals, assertMatch, assertStringIncludes } from "@std/assert";
import { existsSync } from "@std/fs";
import { join } from "@std/path";
import { PHASE_DOCUMENTS as DOCUMENTS, PHASES, refuseStep } from "../scripts/status.ts";
import {
  makeScratch,
  PHASE_DOCUMENTS,
  readJson,
  type Scratch,
  snapshot,
  taskDir,
  writeFile,
  writeLoop,
  writeTask,
} from "./helpers.ts";
import { accept, type Json, refuse, status } from "./status_support.ts";

const WAIT = "human_intervention";

/** Columns in the order of the pipeline, then human_intervention. What a step needs: */
// deno-fmt-ignore
const STEPS = `
  research     . d . . . . . r
  design       r . d . . . . r
  spec         r r . a . . . r
  implement    r r r . d . . r
  code_review  r r r + . d . r
  bug_hunt     r r r + r . d r
  complete     r r r r r r . r
  ${WAIT}      . . . . . . . .
`; // . never  + nothing  d document  a document and approval  r reason

function state(scratch: Scratch, name: string): Json {
  return readJson(join(taskDir(scratch, name), ".state"));
}

function history(scratch: Scratch, name: string): Json[] {
  return state(scratch, name).history as Json[];
}

Deno.test("refuseStep() allows the steps of the pipeline and no others", () => {
  const columns = [...PHASES, WAIT];
  const rows = STEPS.trim().split("\n").map((line) => line.trim().split(/\s+/));
  assertEquals(rows.map(([phase]) => phase), columns);
  let count = 0;
  for (const [phase, ...needs] of rows) {
    for (const [column, need] of needs.entries()) {
      for (const bits of [0, 1, 2, 3, 4, 5, 6, 7]) {
        const [hasDocument, isApproved, hasReason] = [bits & 1, bits & 2, bits & 4].map(Boolean);
        const task = { name: "x", phase: phase!, approved_at: isApproved ? "2026" : null };
        const target = columns[column]!;
        const refusal = refuseStep(task, target, {
          hasDocument: hasDocument!,
          reason: hasReason ? "why" : null,
        });
        const isAllowed = need === "+" || (need === "d" && hasDocument) ||
          (need === "a" && hasDocument && isApproved) || (need === "r" && hasReason);
        const shown = `${phase} -> ${target} (${need}), ${JSON.stringify({ ...task, bits })}`;
        assertEquals(refusal === null, isAllowed, `${shown}: ${refusal?.message}`);
        if (refusal !== null) {
          assertMatch(
            refusal.message,
            new RegExp(`^Cannot move task "x" from ${phase} to ${target}: `),
          );
          assert(refusal.hint !== "", shown);
        }
        count++;
      }
    }
  }
  assertEquals(count, 8 * 8 * 8);
});

Deno.test("refuseStep() takes no step out of a phase that it does not know", () => {
  const task = { name: "x", phase: "lunch", approved_at: null };
  for (const target of [...PHASES, WAIT]) {
    const refusal = refuseStep(task, target, { hasDocument: true, reason: "why" });
    assertStringIncludes(`${refusal?.message}`, "its phase is unknown");
  }
});

Deno.test("each phase but the last leaves a document, and the tests know the same ones", () => {
  assertEquals(Object.entries(DOCUMENTS), PHASE_DOCUMENTS.map((pair) => [...pair]));
  assertEquals(Object.keys(DOCUMENTS), PHASES.slice(0, -1));
});

Deno.test("a task goes from its making to complete, one document and one step at a time", async (t) => {
  using scratch = makeScratch();
  const dir = taskDir(scratch, "walk");
  const step = (target: string) => ["--task=walk", `--transition=${target}`];

  await t.step("it starts in research with an empty history but its making", async () => {
    const made = await accept(scratch, ["--create-task=walk", "--title=A walk"]);
    assertEquals(made, { schema_version: 1, ok: true, task: "walk", phase: "research", dir });
    const { created_at, updated_at, history, ...rest } = state(scratch, "walk");
    assertEquals(created_at, updated_at);
    assertMatch(`${created_at}`, /^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$/);
    assertEquals(rest, {
      schema_version: 1,
      name: "walk",
      title: "A walk",
      phase: "research",
      previous_phase: null,
      approved_at: null,
      claimed_by: null,
      loop: null,
    });
    assertEquals(history, [
      { at: created_at, from: null, to: "research", by: "person", reason: null },
    ]);
  });
  for (const [index, [phase, document]] of PHASE_DOCUMENTS.entries()) {
    const next = PHASES[index + 1]!;
    await t.step(`${phase} is not left without ${document}`, async () => {
      await refuse(
        scratch,
        step(next),
        new RegExp(`${document} is missing or empty hint: write ${document} first`),
      );
      writeFile(join(dir, document), " \n\t\n");
      await refuse(scratch, step(next), /is missing or empty/);
    });
    writeFile(join(dir, document), `# ${document}\n`);
    if (phase === "spec") {
      await t.step("spec is not left without a person's approval", async () => {
        await refuse(scratch, step(next), /no person has approved it hint: status --approve --t/);
        const { phase, approved_at } = await accept(scratch, ["--approve", "--task=walk"]);
        assertEquals(phase, "spec");
        assert(!Number.isNaN(Date.parse(`${approved_at}`)));
      });
    }
    await t.step(`${phase} -> ${next}`, async () => {
      const moved = await accept(scratch, step(next));
      assertEquals([moved.ok, moved.from, moved.phase], [true, phase, next]);
    });
  }
  await t.step("a complete task lies in tasks/complete with all its files", () => {
    assert(!existsSync(dir));
    const files = Object.keys(snapshot(join(taskDir(scratch, "complete"), "walk"))).sort();
    const documents = PHASE_DOCUMENTS.map(([, document]) => document);
    assertEquals(files, [".state", ".state.bak", ".state.lock", ...documents].sort());
  });
  await t.step("its history tells every step", () => {
    const steps = readJson(join(taskDir(scratch, "complete/walk"), ".state")).history as Json[];
    assertEquals(
      steps.map(({ from, to, by }) => [from, to, by]),
      PHASES.map((phase, index) => [PHASES[index - 1] ?? null, phase, "person"]),
    );
  });
  await t.step("it is shown, and not made again", async () => {
    assertEquals((await accept(scratch, ["--task=walk"])).phase, "complete");
    await refuse(scratch, ["--create-task=walk"], /complete\/walk exists/);
  });
  await t.step("it comes back into work with a reason", async () => {
    await refuse(scratch, step("implement"), /needs a reason hint: add --reason/);
    await accept(scratch, [...step("implement"), "--reason=it broke"]);
    assert(existsSync(dir) && !existsSync(taskDir(scratch, "complete/walk")));
    assertEquals(history(scratch, "walk").at(-1)?.reason, "it broke");
  });
});

Deno.test("steps back keep what they need and undo what they must", async (t) => {
  using scratch = makeScratch();
  await t.step(
    "from code_review to implement no reason is needed, and approval stays",
    async () => {
      writeTask(scratch, "rework", "code_review");
      await accept(scratch, ["--transition=implement", "--task=rework"]);
      assert(state(scratch, "rework").approved_at !== null);
      assertEquals(state(scratch, "rework").previous_phase, "code_review");
    },
  );
  await t.step("a specification that is opened again has to be approved again", async () => {
    writeTask(scratch, "again", "implement");
    await accept(scratch, ["--transition=spec", "--task=again", "--reason=wrong"]);
    assertEquals(state(scratch, "again").approved_at, null);
    await refuse(scratch, ["--transition=implement", "--task=again"], /no person has approved/);
  });
  await t.step("leaps are refused and the next phase is named", async () => {
    writeTask(scratch, "leap");
    await refuse(
      scratch,
      ["--transition=implement", "--task=leap", "--reason=now"],
      /the next phase is design hint: status --transition design --task leap/,
    );
  });
});

Deno.test("human_intervention is left by approval alone", async (t) => {
  using scratch = makeScratch();
  await t.step(
    "a task goes there from any phase with a reason, and back where it was",
    async () => {
      for (const phase of PHASES) {
        const name = `from-${phase.replace("_", "-")}`;
        writeTask(scratch, name, phase);
        if (phase === "spec") Deno.writeTextFileSync(join(taskDir(scratch, name), "SPEC.md"), "");
        const before = readJson(
          join(taskDir(scratch, phase === "complete" ? `complete/${name}` : name), ".state"),
        );
        const step = [`--transition=${WAIT}`, `--task=${name}`];
        await refuse(scratch, step, /needs a reason/);
        await accept(scratch, [...step, "--reason=ask"]);
        assertEquals(state(scratch, name).previous_phase, phase);
        await refuse(
          scratch,
          [`--transition=research`, `--task=${name}`, "--reason=x"],
          new RegExp(`it waits for a person hint: status --approve --task ${name}`),
        );
        const approved = await accept(scratch, ["--approve", `--task=${name}`]);
        assertEquals(approved.phase, phase);
        assertEquals(approved.approved_at, before.approved_at, phase);
      }
    },
  );
  await t.step("at the approval gate it goes on to the next phase", async () => {
    writeTask(scratch, "gate", WAIT, { previous_phase: "spec", approved_at: null });
    writeFile(join(taskDir(scratch, "gate"), "SPEC.md"), "what to do\n");
    const { phase, approved_at } = await accept(scratch, ["--approve", "--task=gate"]);
    assertEquals(phase, "implement");
    assert(approved_at !== null);
    const { from, to, by } = history(scratch, "gate").at(-1)!;
    assertEquals([from, to, by], [WAIT, "implement", "person"]);
  });
  await t.step("a loop that waits for a task is named", async () => {
    for (const [name, kind] of [["busy", "backlog"], ["night", "single"]] as const) {
      writeLoop(scratch, name, { work_source: { kind } });
    }
    writeTask(scratch, "next", WAIT, { previous_phase: "design" });
    const { stderr } = await status(scratch, ["--approve", "--task=next"]);
    assertMatch(stderr, /hint: status --claim-loop-task night --task next/);
  });
  await t.step("a task that came from nowhere is not approved", async () => {
    writeTask(scratch, "odd", WAIT, { previous_phase: "lunch" });
    await refuse(scratch, ["--approve", "--task=odd"], /it came from "lunch"/);
  });
});

Deno.test("there is nothing to approve but a written specification", async () => {
  using scratch = makeScratch();
  writeTask(scratch, "early", "design");
  writeTask(scratch, "bare", "spec");
  writeTask(scratch, "twice", "spec", { approved_at: new Date().toISOString() });
  writeFile(join(taskDir(scratch, "twice"), "SPEC.md"), "x");
  const before = snapshot(scratch.project);
  await refuse(scratch, ["--approve", "--task=early"], /in design there is nothing to approve/);
  await refuse(scratch, ["--approve", "--task=bare"], /SPEC.md is missing or empty/);
  await refuse(scratch, ["--approve", "--task=twice"], /was approved at .* --transition implement/);
  const locks = ["early", "bare", "twice"].map((name) => `.automaton/tasks/${name}/.state.lock`);
  assertEquals(snapshot(scratch.project, locks), before);
});

Deno.test("a task made in a later phase is approved from implement on", async () => {
  using scratch = makeScratch();
  for (const phase of PHASES.slice(0, -1)) {
    const name = `new-${phase.replace("_", "-")}`;
    await accept(scratch, [`--create-task=${name}`, `--phase=${phase}`]);
    const isApproved = PHASES.indexOf(phase) >= PHASES.indexOf("implement");
    assertEquals(state(scratch, name).approved_at !== null, isApproved, phase);
  }
  const violations = (await accept(scratch, ["--audit"])).violations;
  assertEquals(violations, [], "a task is well as it was made");
});

Deno.test("a loop makes tasks in research only", async () => {
  using scratch = makeScratch();
  const env = { AUTOMATON_LOOP: "night" };
  const args = ["--create-task=x", "--phase=implement"];
  await refuse(scratch, args, /only a person may; a loop's tasks start in research/, { env });
  assert(!existsSync(taskDir(scratch, "x")));
  await accept(scratch, ["--create-task=x"], { env });
  assertEquals(history(scratch, "x")[0]?.by, "loop:night");
});

Deno.test("a task is shown with all that is known of it", async () => {
  using scratch = makeScratch();
  const dir = writeTask(scratch, "show", "spec", { title: "Show it", extra: { kept: true } });
  const shown = await accept(scratch, ["--task=show"]);
  assertEquals(
    [shown.dir, shown.document, shown.has_document, shown.next_phase, shown.needs_approval],
    [dir, "SPEC.md", false, "implement", true],
  );
  assertEquals(shown.extra, { kept: true });
  const { stdout } = await status(scratch, ["--task=show"]);
  for (const words of ["show: Show it", "SPEC.md (missing)", "approved    no", dir]) {
    assertStringIncludes(stdout, words);
  }
  await accept(scratch, ["--claim", "--task=show", "--session=me"]);
  assertEquals(state(scratch, "show").extra, { kept: true }, "unknown fields are kept");
});

Deno.test("an untracked folder is refused by everything but the audit", async () => {
  using scratch = makeScratch();
  writeFile(join(taskDir(scratch, "wild"), "RESEARCH.md"), "x");
  writeLoop(scratch, "night");
  const before = snapshot(scratch.project);
  for (
    const args of [
      ["--task=wild"],
      ["--transition=design", "--task=wild"],
      ["--approve", "--task=wild"],
      ["--claim", "--task=wild", "--session=me"],
      ["--release", "--task=wild"],
      ["--can-edit", "--task=wild"],
      ["--scope-check", "--task=wild"],
      ["--claim-loop-task=night", "--task=wild"],
    ]
  ) await refuse(scratch, args, /"wild": it has no \.state \(untracked\)/);
  await refuse(scratch, ["--create-task=wild"], /exists/);
  const lock = ".automaton/loops/night/.state.lock";
  assertEquals(snapshot(scratch.project, [lock]), before);
});

Deno.test("a task of a halted loop takes no step, whoever asks", async (t) => {
  using scratch = makeScratch();
  const halted = { status: "halted", halt_reason: "verifier_failed" };
  writeLoop(scratch, "owner", {}, halted);
  writeLoop(scratch, "holder", {}, { ...halted, current_task: "held" });
  writeTask(scratch, "owned", "code_review", { loop: "owner" });
  writeTask(scratch, "held", "code_review");
  for (const [task, loop] of [["owned", "owner"], ["held", "holder"]] as const) {
    await t.step(`${task} by ${loop}`, async () => {
      const step = ["--transition=implement", `--task=${task}`];
      const words = new RegExp(`loop ${loop}, .* is halted hint: status --approve --loop ${loop}`);
      await refuse(scratch, step, words);
    });
    await t.step(`${task} is not set free by a release`, async () => {
      const words = new RegExp(`loop ${loop} has it .* hint: status --approve --loop ${loop}`);
      await refuse(scratch, ["--release", `--task=${task}`], words);
      await refuse(scratch, ["--transition=implement", `--task=${task}`], /is halted/);
    });
    await t.step(`${task} moves again once ${loop} is approved`, async () => {
      await accept(scratch, ["--approve", `--loop=${loop}`]);
      await accept(scratch, ["--transition=implement", `--task=${task}`]);
    });
  }
});

Deno.test("a task is claimed by one session at a time", async () => {
  using scratch = makeScratch();
  writeTask(scratch, "one");
  writeTask(scratch, "done", "complete");
  await accept(scratch, ["--claim", "--task=one", "--session=me"]);
  await accept(scratch, ["--claim", "--task=one", "--session=me"]);
  await refuse(scratch, ["--claim", "--task=one", "--session=you"], /me has it hint: .*--release/);
  await accept(scratch, ["--release", "--task=one"]);
  await accept(scratch, ["--claim", "--task=one", "--session=you"]);
  assertEquals(state(scratch, "one").claimed_by, "you");
  await refuse(scratch, ["--claim", "--task=done", "--session=me"], /it is complete/);
});

Deno.test("of sessions that claim a task at once exactly one gets it", async () => {
  using scratch = makeScratch();
  writeTask(scratch, "one");
  const sessions = ["a", "b", "c", "d", "e", "f"];
  const results = await Promise.all(
    sessions.map((id) => status(scratch, ["--claim", "--task=one", `--session=${id}`])),
  );
  const winners = sessions.filter((_, index) => results[index]!.code === 0);
  assertEquals(winners, [state(scratch, "one").claimed_by]);
});

Deno.test("a task has one owner: a loop or a session, never two", async (t) => {
  using scratch = makeScratch();
  writeLoop(scratch, "a");
  writeLoop(scratch, "b");
  writeTask(scratch, "one");
  const claim = (loop: string, task = "one") => [`--claim-loop-task=${loop}`, `--task=${task}`];
  await t.step("a loop claims it, also twice", async () => {
    await accept(scratch, claim("a"));
    await accept(scratch, claim("a"));
    assertEquals(state(scratch, "one").loop, "a");
    const loop = readJson(join(scratch.project, ".automaton/loops/a/.state.loop"));
    assertEquals(loop.current_task, "one");
  });
  await t.step("another loop does not get it", () => refuse(scratch, claim("b"), /loop a has it/));
  await t.step(
    "nor does a session",
    () => refuse(scratch, ["--claim", "--task=one", "--session=me"], /loop a has it/),
  );
  await t.step("a loop that claims another task gives the first one back", async () => {
    writeTask(scratch, "two");
    await accept(scratch, claim("a", "two"));
    assertEquals([state(scratch, "one").loop, state(scratch, "two").loop], [null, "a"]);
    await accept(scratch, claim("b"));
  });
  await t.step("a loop does not get what a session has", async () => {
    writeTask(scratch, "three");
    await accept(scratch, ["--claim", "--task=three", "--session=me"]);
    await refuse(scratch, claim("a", "three"), /me has it/);
  });
  await t.step("nor what is done or waits", async () => {
    writeTask(scratch, "done", "complete");
    writeTask(scratch, "waits", WAIT);
    await refuse(scratch, claim("a", "done"), /it is complete/);
    await refuse(scratch, claim("a", "waits"), /it waits for a person hint: status --approve/);
  });
  await t.step(
    "what a loop is at work on is not released",
    () => refuse(scratch, ["--release", "--task=two"], /loop a has it/),
  );
  await t.step("what it has left is", async () => {
    writeTask(scratch, "left", "implement", { loop: "a" });
    await accept(scratch, ["--release", "--task=left"]);
    assertEquals(state(scratch, "left").loop, null);
  });
  await t.step("a task of a loop that is no more is free", async () => {
    writeTask(scratch, "orphan", "implement", { loop: "gone" });
    await accept(scratch, claim("b", "orphan"));
  });
  await t.step("a task that ends or waits is given back by that step", async () => {
    for (const [from, to] of [["bug_hunt", "complete"], ["implement", WAIT]] as const) {
      writeTask(scratch, "step", from, { loop: "b" });
      writeFile(join(taskDir(scratch, "step"), "BUG_REPORT.md"), "x");
      await accept(scratch, [`--transition=${to}`, "--task=step", "--reason=r"]);
      const place = to === "complete" ? "complete/step" : "step";
      assertEquals(state(scratch, place).loop, null);
      Deno.removeSync(taskDir(scratch, place), { recursive: true });
    }
  });
});

Deno.test("of loops that claim a task at once exactly one gets it", async () => {
  using scratch = makeScratch();
  writeTask(scratch, "one");
  const loops = ["a", "b", "c", "d", "e", "f"];
  for (const loop of loops) writeLoop(scratch, loop);
  const results = await Promise.all(
    loops.map((loop) => status(scratch, [`--claim-loop-task=${loop}`, "--task=one"])),
  );
  const winners = loops.filter((_, index) => results[index]!.code === 0);
  assertEquals(winners, [state(scratch, "one").loop]);
});

Deno.test("within a tick a claim leaves the loop's state to the tick's one save", async () => {
  using scratch = makeScratch();
  const dir = writeLoop(scratch, "night");
  writeTask(scratch, "one");
  const before = snapshot(dir);
  const env = { AUTOMATON_NO_LOOP_LOCK: "1" };
  await accept(scratch, ["--claim-loop-task=night", "--task=one"], { env });
  assertEquals(snapshot(dir), before);
  assertEquals(state(scratch, "one").loop, "night");
});

Deno.test("of several that make one task exactly one does, and it is whole", async () => {
  using scratch = makeScratch();
  const titles = ["a", "b", "c", "d", "e", "f"];
  const results = await Promise.all(
    titles.map((title) => status(scratch, ["--create-task=same", `--title=${title}`])),
  );
  const winners = titles.filter((_, index) => results[index]!.code === 0);
  assertEquals(winners, [state(scratch, "same").title]);
  for (const { code, stderr } of results) {
    if (code === 0) continue;
    assertEquals(code, 1);
    assertMatch(stderr, /^status: Cannot create .*(exists|another command just did)\nhint: .*\n$/);
  }
  const tasks = join(scratch.project, ".automaton/tasks");
  assertEquals([...Deno.readDirSync(tasks)].map(({ name }) => name), ["same"]);
});

Deno.test("of several equal steps at once exactly one is taken", async () => {
  using scratch = makeScratch();
  const dir = writeTask(scratch, "one", "bug_hunt");
  writeFile(join(dir, "BUG_REPORT.md"), "x");
  const step = ["--transition=complete", "--task=one"];
  const results = await Promise.all(Array.from({ length: 6 }, () => status(scratch, step)));
  assertEquals(results.filter(({ code }) => code === 0).length, 1);
  for (const { stderr, code } of results) {
    if (code !== 0) {
      assertMatch(stderr, /^status: Cannot move task .*: it is there already\nhint: /);
    }
  }
  const steps = history(scratch, "complete/one");
  assertEquals(steps.filter(({ to }) => to === "complete").length, 1);
});

Deno.test("a task does not move onto another of its name", async () => {
  using scratch = makeScratch();
  const dir = writeTask(scratch, "one", "bug_hunt");
  writeFile(join(dir, "BUG_REPORT.md"), "x");
  writeFile(join(taskDir(scratch, "complete"), "one", "note"), "an older one");
  await refuse(scratch, ["--transition=complete", "--task=one"], /complete\/one exists hint: move/);
  assertEquals(state(scratch, "one").phase, "bug_hunt");
});

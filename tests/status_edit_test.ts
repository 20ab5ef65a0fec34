/** status: which files may be edited now, and which were changed outside the scope. */
import { assertEquals, assertMatch, assertStringIncludes } from "@std/assert";
import { join } from "@std/path";
import {
  git,
  loopDir,
  makeRepository,
  makeScratch,
  type Scratch,
  snapshot,
  taskDir,
  writeFile,
  writeLoop,
  writeTask,
} from "./helpers.ts";
import { accept, becomeNobody, type Json, misuse, refuse, status } from "./status_support.ts";

/** Asks whether a file may be edited; "yes", or why not. */
async function ask(scratch: Scratch, ...args: readonly string[]): Promise<string> {
  const result = await status(scratch, ["--can-edit", ...args, "--json"]);
  const answer: Json = JSON.parse(result.stdout);
  const shown = `${args.join(" ")}: ${result.stdout}${result.stderr}`;
  assertEquals(result.code, answer.allowed === true ? 0 : 1, shown);
  assertEquals(/^hint: .*\n$/.test(result.stderr), answer.allowed !== true, shown);
  assertEquals(typeof answer.reason, "string", shown);
  return answer.allowed === true ? "yes" : `${answer.reason}`;
}

/** A project with sources and tasks, and a loop with a worktree and a scope. */
function prepare(scratch: Scratch): string {
  makeRepository(scratch, scratch.project, {
    "src/a.ts": "a\n",
    "docs/a.md": "a\n",
    ".gitignore": ".automaton/\n",
  });
  writeTask(scratch, "work", "implement");
  writeTask(scratch, "plan", "design");
  writeTask(scratch, "done", "complete");
  writeFile(join(taskDir(scratch, "wild"), "note"), "x");
  const worktree = join(loopDir(scratch, "night"), "worktree");
  git(scratch, scratch.project, "worktree", "add", "--quiet", worktree, "-b", "loop/night");
  writeLoop(scratch, "night", { blast_radius: { file_scope: ["src/", "README.md"] } }, {
    worktree_path: worktree,
    current_task: "work",
  });
  return worktree;
}

Deno.test("sources are edited in implement, task files until the task is complete", async (t) => {
  using scratch = makeScratch("a project");
  prepare(scratch);
  const cases: readonly (readonly [args: readonly string[], words: RegExp])[] = [
    [["--task=work"], /^yes$/],
    [["--task=work", "--file=src/a.ts"], /^yes$/],
    [["--task=work", "--file=src/new/deep.ts"], /^yes$/],
    [["--task=work", "--file=./src/../docs/a.md"], /^yes$/],
    [["--task=work", `--file=${join(scratch.project, "src/a.ts")}`], /^yes$/],
    [["--task=plan"], /^task plan is in design; sources change in implement$/],
    [["--task=plan", "--file=src/a.ts"], /sources change in implement$/],
    [["--task=plan", "--file=.automaton/tasks/plan/DESIGN.md"], /^yes$/],
    [["--file=.automaton/tasks/plan/DESIGN.md"], /^yes$/],
    [["--file=.automaton/tasks/plan/notes/deep.md"], /^yes$/],
    [["--task=work", "--file=.automaton/tasks/plan/DESIGN.md"], /belongs to task plan$/],
    [["--task=done"], /^task done is complete$/],
    [["--file=.automaton/tasks/complete/done/SPEC.md"], /^task done is complete$/],
    [["--file=src/a.ts"], /^no task is named/],
    [["--file=.automaton/tasks/plan/.state"], /changed by status alone$/],
    [["--file=.automaton/tasks/plan/.state.bak"], /changed by status alone$/],
    [["--file=.automaton/tasks/plan"], /changed by status alone$/],
    [["--file=.automaton/tasks"], /changed by status alone$/],
    [["--task=work", "--file=.automaton/loops/night/loop.json"], /is no source$/],
    [["--task=work", "--file=.automaton/models.json"], /is no source$/],
    [["--task=work", "--file=.AUTOMATON/models.json"], /is no source$/],
    [["--task=work", "--file=.git/config"], /is no source$/],
    [["--task=work", "--file=.Git/hooks/pre-commit"], /is no source$/],
    [["--task=work", "--file=vendor/library/.git/config"], /is no source$/],
    [["--task=work", "--file=.github/workflows/ci.yml"], /^yes$/],
    [["--task=work", "--file=."], /outside/],
  ];
  for (const [args, words] of cases) {
    await t.step(args.join(" "), async () => {
      assertMatch(await ask(scratch, ...args), words);
    });
  }
  await t.step("an untracked task, or one that is not there, is refused", async () => {
    await refuse(scratch, ["--can-edit", "--task=wild"], /untracked/);
    await refuse(scratch, ["--can-edit", "--task=gone"], /there is none/);
    await refuse(scratch, ["--can-edit", "--file=.automaton/tasks/wild/note"], /untracked/);
  });
});

Deno.test("a file that really lies elsewhere is denied, however it is spelled", async (t) => {
  using scratch = makeScratch();
  const worktree = prepare(scratch);
  const outside = join(scratch.dir, "outside");
  writeFile(join(outside, "secret"), "x");
  const link = (path: string, target: string) =>
    Deno.symlinkSync(target, join(scratch.project, path));
  link("link-to-file", join(outside, "secret"));
  link("link-to-folder", outside);
  link("link-to-nothing", join(outside, "not/there"));
  link("link-to-itself", "link-to-itself");
  link("link-to-git", ".git");
  link("link-inside", "src");
  const long = `src/${"x".repeat(300)}`;
  const cases: readonly (readonly [file: string, words: RegExp])[] = [
    ["../outside/secret", /leads to .*outside\/secret, outside /],
    ["src/../../outside/secret", /outside/],
    ["/etc/passwd", /leads to \/etc\/passwd, outside /],
    [join(outside, "secret"), /outside/],
    [`${scratch.project}/../outside/secret`, /outside/],
    [`${scratch.project}-twin/file`, /outside/],
    ["link-to-file", /leads to .*outside\/secret, outside /],
    ["link-to-folder/secret", /outside/],
    ["link-to-folder/new/deep", /outside/],
    ["link-to-folder/../project/src/a.ts", /^yes$/],
    ["link-to-nothing", /Cannot follow/],
    ["link-to-nothing/deep", /Cannot follow/],
    ["link-to-itself", /Cannot follow/],
    ["link-to-git/config", /is no source$/],
    ["link-inside/a.ts", /^yes$/],
    ["src/a.ts/below-a-file", /^yes$/],
    [long, /^(yes|Cannot follow.*)$/],
    [worktree, /is no source$/],
    [join(worktree, "src/a.ts"), /is no source$/],
  ];
  for (const [file, words] of cases) {
    await t.step(file.replace(scratch.dir, "…").slice(0, 60), async () => {
      assertMatch(await ask(scratch, "--task=work", `--file=${file}`), words);
    });
  }
});

Deno.test("in its own worktree a loop edits what its scope allows", async (t) => {
  using scratch = makeScratch();
  const worktree = prepare(scratch);
  Deno.symlinkSync("../docs", join(worktree, "src/link-out-of-scope"));
  Deno.symlinkSync(scratch.project, join(worktree, "src/link-out"));
  const own = ["--loop=night", "--loop-worktree"];
  const cases: readonly (readonly [args: readonly string[], words: RegExp])[] = [
    [[...own], /^yes$/],
    [[...own, "--file=src/a.ts"], /^yes$/],
    [[...own, "--file=README.md"], /^yes$/],
    [[...own, `--file=${join(worktree, "src/b.ts")}`], /^yes$/],
    [[...own, "--file=docs/a.md"], /^docs\/a.md is outside the file scope of loop night$/],
    [[...own, "--file=src/../docs/a.md"], /^docs\/a.md is outside the file scope/],
    [[...own, "--file=src/link-out-of-scope/a.md"], /^docs\/a.md is outside the file scope/],
    [[...own, "--file=src/link-out/src/a.ts"], /leads to .*, outside /],
    [[...own, `--file=${join(scratch.project, "src/a.ts")}`], /outside /],
    [[...own, "--file=.git"], /is no source$/],
    [[...own, `--file=${taskDir(scratch, "work")}/IMPLEMENTATION.md`], /^yes$/],
    [[...own, `--file=${taskDir(scratch, "plan")}/DESIGN.md`], /^yes$/],
    [[...own, "--task=work", `--file=${taskDir(scratch, "plan")}/DESIGN.md`], /belongs to task p/],
    [[...own, "--task=plan", "--file=src/a.ts"], /sources change in implement$/],
    [["--loop=night", "--file=src/a.ts"], /^yes$/],
    [["--loop=night", "--file=docs/a.md"], /outside the file scope of loop night$/],
  ];
  for (const [args, words] of cases) {
    await t.step(args.join(" ").replaceAll(scratch.dir, "…"), async () => {
      assertMatch(await ask(scratch, ...args), words);
    });
  }
  await t.step("not when it is halted", async () => {
    const state = { worktree_path: worktree, current_task: "work" };
    writeLoop(scratch, "night", {}, { ...state, status: "halted", halt_reason: "drift_detected" });
    assertEquals(await ask(scratch, ...own, "--file=src/a.ts"), "loop night is halted");
  });
  await t.step("not without a worktree", async () => {
    writeLoop(scratch, "night", {}, { current_task: "work" });
    assertEquals(await ask(scratch, ...own, "--file=src/a.ts"), "loop night has no worktree");
    writeLoop(scratch, "night", {}, { current_task: "work", worktree_path: "/nowhere/at/all" });
    assertMatch(await ask(scratch, ...own, "--file=/etc/passwd"), /outside/);
  });
  await t.step("a loop that is not there is refused", async () => {
    await refuse(scratch, ["--can-edit", "--loop=gone", "--task=work"], /there is none/);
  });
});

Deno.test("a project behind a link, or with its .automaton behind one, is the same project", async (t) => {
  using scratch = makeScratch();
  prepare(scratch);
  const link = join(scratch.dir, "link");
  Deno.symlinkSync(scratch.project, link);
  await t.step("the project", async () => {
    const at = `--project=${link}`;
    assertEquals(await ask(scratch, at, "--task=work", "--file=src/a.ts"), "yes");
    assertEquals(await ask(scratch, at, "--task=work", `--file=${link}/src/a.ts`), "yes");
    const real = `--file=${scratch.project}/src/a.ts`;
    assertEquals(await ask(scratch, at, "--task=work", real), "yes");
    assertMatch(await ask(scratch, at, "--task=work", `--file=${link}/../x`), /outside/);
    assertEquals((await accept(scratch, ["--check-gate=night", at])).ok, true);
  });
  await t.step("its .automaton", async () => {
    const elsewhere = join(scratch.dir, "states");
    Deno.renameSync(join(scratch.project, ".automaton"), elsewhere);
    Deno.symlinkSync(elsewhere, join(scratch.project, ".automaton"));
    assertEquals(await ask(scratch, "--file=.automaton/tasks/plan/DESIGN.md"), "yes");
    assertEquals(await ask(scratch, `--file=${elsewhere}/tasks/plan/DESIGN.md`), "yes");
    const own = "--file=.automaton/loops/night/loop.json";
    assertMatch(await ask(scratch, "--task=work", own), /outside/);
    assertEquals((await accept(scratch, ["--audit"])).total_tasks, 4);
    await accept(scratch, ["--transition=human_intervention", "--task=plan", "--reason=x"]);
  });
});

Deno.test("a folder that may not be looked into hides no way out", async () => {
  using scratch = makeScratch();
  prepare(scratch);
  const locked = join(scratch.project, "locked");
  Deno.mkdirSync(locked);
  Deno.symlinkSync(scratch.dir, join(locked, "link"));
  Deno.chmodSync(locked, 0o000);
  const args = ["--can-edit", "--task=work", "--file=locked/link/x", "--json"];
  const { stdout } = await status(scratch, args, { prefix: becomeNobody(scratch) });
  assertMatch(`${JSON.parse(stdout).reason}`, /^Cannot follow .*Permission denied/);
});

Deno.test("--scope-check lists what a loop has changed outside its scope", async (t) => {
  using scratch = makeScratch();
  const worktree = prepare(scratch);
  const before = snapshot(loopDir(scratch, "night"));
  await t.step("nothing", async () => {
    const { ok, loop, out_of_scope_files } = await accept(scratch, [
      "--scope-check",
      "--loop=night",
    ]);
    assertEquals([ok, loop, out_of_scope_files], [true, "night", []]);
  });
  writeFile(join(worktree, "docs/a.md"), "changed\n");
  writeFile(join(worktree, "src/a.ts"), "changed\n");
  await t.step("a file", async () => {
    const { code, stdout, stderr } = await status(scratch, ["--scope-check", "--loop=night"]);
    assertEquals([code, stdout], [1, 'out of scope: "docs/a.md"\n']);
    assertMatch(stderr, /^hint: undo these changes, or widen the scope in loop.json\n$/);
  });
  await t.step("by the task that the loop owns", async () => {
    writeTask(scratch, "work", "implement", { loop: "night" });
    const { code, stdout } = await status(scratch, ["--scope-check", "--task=work", "--json"]);
    const { schema_version: _, ...answer } = JSON.parse(stdout);
    assertEquals(code, 1);
    assertEquals(answer, {
      ok: false,
      task: "work",
      loop: "night",
      out_of_scope_files: ["docs/a.md"],
    });
  });
  Deno.removeSync(join(worktree, "docs/a.md"));
  git(scratch, worktree, "checkout", "--", ".");
  assertEquals(snapshot(loopDir(scratch, "night")), before, "a check changes nothing");
  await t.step("a loop without a worktree is looked at in the project", async () => {
    writeLoop(scratch, "night", { blast_radius: { worktree: false, file_scope: ["src"] } });
    writeFile(join(scratch.project, "docs/a.md"), "changed\n");
    const { stdout } = await status(scratch, ["--scope-check", "--loop=night"]);
    assertEquals(stdout, 'out of scope: "docs/a.md"\n');
  });
});

Deno.test("--scope-check of a task lists sources that are changed in a phase that changes none", async (t) => {
  using scratch = makeScratch();
  prepare(scratch);
  const check = (task: string) => status(scratch, ["--scope-check", `--task=${task}`]);
  await t.step("nothing has changed", async () => assertEquals((await check("plan")).code, 0));
  writeFile(join(scratch.project, "src/a.ts"), "changed\n");
  writeFile(join(scratch.project, "src/new.ts"), "new\n");
  await t.step("in design", async () => {
    const { code, stdout } = await check("plan");
    assertEquals([code, stdout], [1, 'out of scope: "src/a.ts"\nout of scope: "src/new.ts"\n']);
  });
  await t.step("in implement", async () => assertEquals((await check("work")).code, 0));
});

Deno.test("--scope-check where git knows nothing is no success", async () => {
  using scratch = makeScratch();
  writeTask(scratch, "plan", "design");
  await refuse(scratch, ["--scope-check", "--task=plan"], /it is no git checkout.* hint: git init/);
  await misuse(scratch, ["--scope-check"], /give --task or --loop/);
});

Deno.test("an answer in words says yes or no first", async () => {
  using scratch = makeScratch();
  prepare(scratch);
  const yes = await status(scratch, ["--can-edit", "--task=work"]);
  assertEquals([yes.stdout, yes.stderr], ["allowed: task work is in implement\n", ""]);
  const no = await status(scratch, ["--can-edit", "--task=plan"]);
  assertStringIncludes(no.stdout, "denied: task plan is in design; sources change in implement\n");
  assertEquals(no.stderr, "hint: status --task plan\n");
});

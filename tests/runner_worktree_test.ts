/** Where a tick works: each case of making, finding and repairing a worktree, with real git. */
import { assert, assertEquals, assertMatch, assertStringIncludes } from "@std/assert";
import { basename, join } from "@std/path";
import {
  git,
  loopDir,
  makeRepository,
  makeScratch,
  readLog,
  type Scratch,
  writeFile,
  writeLoop,
  writeScript,
  writeTask,
} from "./helpers.ts";
import {
  HARNESS,
  LOOP,
  makeLoop,
  makeLoopScratch,
  readJournal,
  readState,
  readStateText,
  TASK,
  tick,
  worktreeOf,
} from "./runner_support.ts";

/** All of a person's checkout that a loop must leave alone. */
function describeCheckout(scratch: Scratch, dir = scratch.project): Record<string, string> {
  return {
    head: git(scratch, dir, "rev-parse", "HEAD"),
    branch: git(scratch, dir, "rev-parse", "--abbrev-ref", "HEAD"),
    status: git(scratch, dir, "status", "--porcelain"),
    config: git(scratch, dir, "config", "--local", "--list"),
    readme: Deno.readTextFileSync(join(dir, "README.md")),
    stash: git(scratch, dir, "stash", "list"),
  };
}

/** The branches of a repository, without the mark of the one that is checked out. */
function listBranches(scratch: Scratch, dir = scratch.project): string[] {
  return git(scratch, dir, "branch", "--format=%(refname:short)").split("\n").sort();
}

Deno.test("a first tick makes a worktree on a branch of the loop's own and notes its base", async () => {
  using scratch = makeLoopScratch();
  const before = describeCheckout(scratch);
  const { code, json } = await tick(scratch);
  assertEquals([code, json.reason, json.warnings], [0, null, []]);
  const state = readState(scratch);
  assertEquals(state.worktree_path, worktreeOf(scratch));
  assertEquals(state.worktree_branch, `loop/${LOOP}`);
  assertEquals(state.base_branch, "main");
  assertEquals(state.base_commit, before.head);
  assertEquals(
    Deno.readTextFileSync(join(worktreeOf(scratch), "work.txt")),
    "worked in implement\n",
  );
  assertEquals(describeCheckout(scratch), before);
  assertEquals(listBranches(scratch), [`loop/${LOOP}`, "main"]);
});

Deno.test("worktrees are kept out of git's sight by one line in the exclude file, however often a tick runs", async () => {
  using scratch = makeScratch();
  makeLoop(scratch);
  writeFile(join(scratch.project, ".gitignore"), "nothing\n");
  git(scratch, scratch.project, "commit", "-qam", "ignore nothing");
  writeFile(join(scratch.project, ".git/info/exclude"), "mine");
  await tick(scratch);
  await tick(scratch);
  const text = Deno.readTextFileSync(join(scratch.project, ".git/info/exclude"));
  assertEquals(text, "mine\n.automaton/loops/*/worktree\n");
  const status = git(scratch, scratch.project, "status", "--porcelain", "--untracked-files=all");
  assert(!status.includes("/worktree/"), status);
});

Deno.test("a branch of an earlier loop is used again, with the commits on it", async () => {
  using scratch = makeLoopScratch();
  const start = git(scratch, scratch.project, "rev-parse", "HEAD");
  git(scratch, scratch.project, "branch", `loop/${LOOP}`);
  const other = join(scratch.dir, "other");
  git(scratch, scratch.project, "worktree", "add", "-q", other, `loop/${LOOP}`);
  writeFile(join(other, "earlier.txt"), "kept\n");
  git(scratch, other, "add", "earlier.txt");
  git(scratch, other, "commit", "-qm", "earlier work");
  git(scratch, scratch.project, "worktree", "remove", other);
  const { json } = await tick(scratch);
  assertEquals(json.reason, null);
  assertEquals(Deno.readTextFileSync(join(worktreeOf(scratch), "earlier.txt")), "kept\n");
  assertEquals(readState(scratch).base_commit, start);
});

Deno.test("a branch that is checked out elsewhere skips the tick with git's words", async () => {
  using scratch = makeLoopScratch();
  const other = join(scratch.dir, "other");
  git(scratch, scratch.project, "worktree", "add", "-q", "-b", `loop/${LOOP}`, other);
  const before = describeCheckout(scratch);
  const state = readStateText(scratch);
  const { code, json } = await tick(scratch);
  assertEquals([code, json.skipped, json.reason], [0, true, "worktree_failed"]);
  assertMatch(json.message!, /loop\/night.*(already|checked out|used by)/);
  assertEquals(readJournal(scratch), []);
  assertEquals(readStateText(scratch), state);
  assertEquals(describeCheckout(scratch), before);
});

Deno.test("a folder in the worktree's place that git does not know is moved aside, with its files", async () => {
  using scratch = makeLoopScratch();
  writeFile(join(worktreeOf(scratch), "precious.txt"), "somebody's\n");
  const { json } = await tick(scratch);
  assertEquals(json.reason, null);
  assertMatch(
    json.warnings.join(),
    /was no worktree of this repository and is now .*worktree\.\d{8}T\d+Z/,
  );
  const aside = [...Deno.readDirSync(loopDir(scratch, LOOP))].filter(({ name }) =>
    name.startsWith("worktree.")
  );
  assertEquals(aside.length, 1);
  const kept = join(loopDir(scratch, LOOP), aside[0]!.name, "precious.txt");
  assertEquals(Deno.readTextFileSync(kept), "somebody's\n");
  assertEquals(
    git(scratch, worktreeOf(scratch), "rev-parse", "--abbrev-ref", "HEAD"),
    `loop/${LOOP}`,
  );
});

Deno.test("a worktree that has lost its .git file is moved aside and made anew", async () => {
  using scratch = makeLoopScratch();
  await tick(scratch);
  Deno.removeSync(join(worktreeOf(scratch), ".git"));
  writeFile(join(worktreeOf(scratch), "unsaved.txt"), "kept\n");
  const { json } = await tick(scratch);
  assertEquals(json.reason, null);
  const aside = [...Deno.readDirSync(loopDir(scratch, LOOP))].find(({ name }) =>
    name.startsWith("worktree.")
  )!;
  const kept = join(loopDir(scratch, LOOP), aside.name, "unsaved.txt");
  assertEquals(Deno.readTextFileSync(kept), "kept\n");
  assertEquals(git(scratch, worktreeOf(scratch), "rev-parse", "--is-inside-work-tree"), "true");
});

Deno.test("a worktree that is registered but missing is pruned and made again on its branch", async () => {
  using scratch = makeLoopScratch({ config: { blast_radius: { commit: "on_pass" } } });
  await tick(scratch);
  const commit = git(scratch, worktreeOf(scratch), "rev-parse", "HEAD");
  Deno.removeSync(worktreeOf(scratch), { recursive: true });
  const { json } = await tick(scratch);
  assertEquals([json.reason, json.tick], [null, 2]);
  git(scratch, worktreeOf(scratch), "merge-base", "--is-ancestor", commit, "HEAD");
  assertEquals(git(scratch, scratch.project, "worktree", "list").split("\n").length, 2);
});

Deno.test("a worktree that is missing and locked is left to the person who locked it", async () => {
  using scratch = makeLoopScratch();
  await tick(scratch);
  git(scratch, scratch.project, "worktree", "lock", "--reason", "on a stick", worktreeOf(scratch));
  Deno.removeSync(worktreeOf(scratch), { recursive: true });
  const before = describeCheckout(scratch);
  const { json } = await tick(scratch);
  assertEquals(json.reason, "worktree_failed");
  assertStringIncludes(json.message!, "on a stick");
  assertStringIncludes(json.message!, "git worktree unlock");
  assertEquals(describeCheckout(scratch), before);
  assertStringIncludes(git(scratch, scratch.project, "worktree", "list"), "locked");
});

Deno.test("a worktree that is locked and there is used", async () => {
  using scratch = makeLoopScratch();
  await tick(scratch);
  git(scratch, scratch.project, "worktree", "lock", worktreeOf(scratch));
  assertEquals((await tick(scratch)).json.reason, null);
});

Deno.test("a worktree that an agent has left on another branch is used, with a warning", async () => {
  using scratch = makeLoopScratch({ implement: "git switch -q -c elsewhere && echo x >work.txt" });
  await tick(scratch);
  const { json } = await tick(scratch);
  assertStringIncludes(json.warnings.join(), "the worktree is on elsewhere, not on loop/night");
});

Deno.test("a repository without a commit skips the tick and says what to do", async () => {
  using scratch = makeScratch();
  git(scratch, scratch.project, "init", "--quiet");
  makeLoop(scratch, { isRepository: false });
  const { json } = await tick(scratch);
  assertEquals(json.reason, "worktree_failed");
  assertEquals(json.message, "the repository has no commit yet: make the first one");
  assertEquals(readJournal(scratch), []);
});

Deno.test("a detached HEAD is the base, without a branch", async () => {
  using scratch = makeLoopScratch();
  git(scratch, scratch.project, "checkout", "--quiet", "--detach");
  const before = describeCheckout(scratch);
  const { json } = await tick(scratch);
  assertEquals(json.reason, null);
  const { base_branch, base_commit } = readState(scratch);
  assertEquals([base_branch, base_commit], [null, before.head]);
  assertEquals(describeCheckout(scratch), before);
});

for (const branch of ["master", "trunk", "größe/émile", "release-1.0"]) {
  Deno.test(`the branch that is checked out is the base, whatever its name: ${branch}`, async () => {
    using scratch = makeLoopScratch();
    git(scratch, scratch.project, "branch", "-m", branch);
    assertEquals((await tick(scratch)).json.reason, null);
    assertEquals(readState(scratch).base_branch, branch);
  });
}

Deno.test("origin/HEAD goes before the branch that is checked out", async () => {
  using scratch = makeScratch();
  const upstream = join(scratch.dir, "upstream");
  makeRepository(scratch, upstream);
  const published = git(scratch, upstream, "rev-parse", "HEAD");
  Deno.removeSync(scratch.project, { recursive: true });
  git(scratch, scratch.dir, "clone", "--quiet", upstream, scratch.project);
  writeFile(join(scratch.project, "local.txt"), "not pushed\n");
  git(scratch, scratch.project, "add", "local.txt");
  git(scratch, scratch.project, "commit", "-qm", "local");
  makeLoop(scratch, { isRepository: false });
  assertEquals((await tick(scratch)).json.reason, null);
  const { base_branch, base_commit } = readState(scratch);
  assertEquals([base_branch, base_commit], ["origin/main", published]);
});

Deno.test("an origin/HEAD that leads nowhere is passed over", async () => {
  using scratch = makeLoopScratch();
  git(
    scratch,
    scratch.project,
    "symbolic-ref",
    "refs/remotes/origin/HEAD",
    "refs/remotes/origin/gone",
  );
  assertEquals((await tick(scratch)).json.reason, null);
  assertEquals(readState(scratch).base_branch, "main");
});

Deno.test("blast_radius.base names the base", async () => {
  using scratch = makeLoopScratch({ config: { blast_radius: { base: "stable" } } });
  git(scratch, scratch.project, "branch", "stable");
  writeFile(join(scratch.project, "new.txt"), "new\n");
  git(scratch, scratch.project, "add", "new.txt");
  git(scratch, scratch.project, "commit", "-qm", "new");
  assertEquals((await tick(scratch)).json.reason, null);
  const { base_branch, base_commit } = readState(scratch);
  const stable = git(scratch, scratch.project, "rev-parse", "stable");
  assertEquals([base_branch, base_commit], ["stable", stable]);
});

Deno.test("a blast_radius.base that is no branch skips the tick and names it", async () => {
  using scratch = makeLoopScratch({ config: { blast_radius: { base: "nowhere" } } });
  const { json } = await tick(scratch);
  assertEquals(json.reason, "worktree_failed");
  assertStringIncludes(json.message!, '"nowhere" is no branch of this repository');
});

Deno.test("submodules are filled in a new worktree and in one where they are empty", async () => {
  using scratch = makeScratch();
  const inner = join(scratch.dir, "inner");
  makeRepository(scratch, inner, { "inner.txt": "inner\n" });
  makeRepository(scratch, scratch.project, {
    "README.md": "outer\n",
    ".gitignore": ".automaton/\n",
  });
  git(scratch, scratch.project, "submodule", "--quiet", "add", inner, "lib/inner");
  git(scratch, scratch.project, "commit", "-qm", "with a submodule");
  makeLoop(scratch, {
    isRepository: false,
    config: { blast_radius: { file_scope: ["work.txt"] } },
  });
  const file = join(worktreeOf(scratch), "lib/inner/inner.txt");
  assertEquals((await tick(scratch)).json.reason, null);
  assertEquals(Deno.readTextFileSync(file), "inner\n");
  git(scratch, worktreeOf(scratch), "submodule", "--quiet", "deinit", "--force", "lib/inner");
  assertEquals((await tick(scratch)).json.reason, null);
  assertEquals(Deno.readTextFileSync(file), "inner\n");
});

Deno.test("a submodule that cannot be had skips the tick with git's words", async () => {
  using scratch = makeScratch();
  const inner = join(scratch.dir, "inner");
  makeRepository(scratch, inner);
  makeRepository(scratch, scratch.project, {
    "README.md": "outer\n",
    ".gitignore": ".automaton/\n",
  });
  git(scratch, scratch.project, "submodule", "--quiet", "add", inner, "inner");
  git(scratch, scratch.project, "commit", "-qm", "with a submodule");
  Deno.removeSync(join(scratch.project, ".git/modules/inner"), { recursive: true });
  Deno.renameSync(inner, `${inner}.gone`);
  makeLoop(scratch, { isRepository: false });
  const { json } = await tick(scratch);
  assertEquals(json.reason, "worktree_failed");
  assertMatch(json.message!, /git submodule update.*(clone|repository)/s);
  assertEquals(readJournal(scratch), []);
});

Deno.test("a project behind a symbolic link is the same project", async () => {
  using scratch = makeLoopScratch();
  const link = join(scratch.dir, "link");
  Deno.symlinkSync(scratch.project, link);
  assertEquals((await tick(scratch, ["--project", link])).json.reason, null);
  assertEquals((await tick(scratch)).json.warnings, []);
  assertEquals((await tick(scratch, [], { cwd: link })).json.tick, 3);
  assertEquals(readState(scratch).worktree_path, worktreeOf(scratch));
  assertEquals(git(scratch, scratch.project, "worktree", "list").split("\n").length, 2);
});

Deno.test("a project in a folder of a repository works, and its worktrees stay out of sight", async () => {
  using scratch = makeScratch("repo/a project");
  const top = join(scratch.dir, "repo");
  makeRepository(scratch, top);
  makeLoop(scratch, { isRepository: false });
  assertEquals((await tick(scratch)).json.reason, null);
  assert(Deno.statSync(join(worktreeOf(scratch), "README.md")).isFile);
  const exclude = Deno.readTextFileSync(join(top, ".git/info/exclude"));
  assertStringIncludes(exclude, "**/.automaton/loops/*/worktree\n");
  const status = git(scratch, top, "status", "--porcelain", "--untracked-files=all");
  assert(!status.includes("worktree/"), status);
});

Deno.test("a project that is itself a worktree gets one of its own", async () => {
  using scratch = makeScratch("linked");
  const top = join(scratch.dir, "top");
  makeRepository(scratch, top, { "README.md": "x\n", ".gitignore": ".automaton/\n" });
  Deno.removeSync(scratch.project, { recursive: true });
  git(scratch, top, "worktree", "add", "-q", "-b", "side", scratch.project);
  makeLoop(scratch, { isRepository: false });
  assertEquals((await tick(scratch)).json.reason, null);
  assertEquals(readState(scratch).base_branch, "side");
  assertEquals(git(scratch, top, "worktree", "list").split("\n").length, 3);
});

Deno.test("outside of git the harness works in the project itself, and a warning says so", async () => {
  using scratch = makeLoopScratch({ isRepository: false });
  const { json } = await tick(scratch);
  assertEquals(json.reason, null);
  assertStringIncludes(json.warnings.join(), "the project is no git repository");
  assert(Deno.statSync(join(scratch.project, "work.txt")).isFile);
  assertEquals(readState(scratch).worktree_path, null);
  assert(readLog(scratch, LOOP).some((line) => line.event === "WARNING"));
});

Deno.test("without git on PATH the harness works in the project itself, and a warning says so", async () => {
  using scratch = makeLoopScratch({ isRepository: false });
  for (const tool of ["sh", "cat", "grep", "sed", "tail", "head", "env"]) {
    const { stdout } = new Deno.Command("which", { args: [tool] }).outputSync();
    Deno.symlinkSync(new TextDecoder().decode(stdout).trim(), join(scratch.bin, tool));
  }
  const { json } = await tick(scratch, [], { env: { PATH: scratch.bin } });
  assertEquals(json.reason, null);
  assertMatch(json.warnings.join(), /git cannot be run .*works in the project itself/);
});

Deno.test("a repository that git refuses to use skips the tick with git's words, and nothing runs in it", async () => {
  using scratch = makeLoopScratch();
  writeFile(join(scratch.project, ".git/config"), "[core\nbroken\n");
  const { json } = await tick(scratch);
  assertEquals(json.reason, "worktree_failed");
  assertStringIncludes(json.message!, "config");
  assertEquals(readJournal(scratch), []);
});

Deno.test("a bare repository in the project's place skips the tick, and nothing runs in it", async () => {
  using scratch = makeScratch();
  git(scratch, scratch.project, "init", "--quiet", "--bare");
  makeLoop(scratch, { isRepository: false });
  const { json } = await tick(scratch);
  assertEquals(json.reason, "worktree_failed");
  assertEquals(readJournal(scratch), []);
});

Deno.test("a hook that fails after the checkout is told in git's words, and the next tick goes on", async () => {
  using scratch = makeLoopScratch();
  writeScript(
    join(scratch.project, ".git/hooks/post-checkout"),
    "#!/bin/sh\necho no room >&2\nexit 1\n",
  );
  const first = await tick(scratch);
  assertEquals(first.json.reason, "worktree_failed");
  assertStringIncludes(first.json.message!, "no room");
  assertEquals((await tick(scratch)).json.reason, null);
});

Deno.test("variables of a git hook that starts a tick do not lead it to another repository", async () => {
  using scratch = makeLoopScratch();
  const other = join(scratch.dir, "other");
  makeRepository(scratch, other);
  const env = {
    GIT_DIR: join(other, ".git"),
    GIT_WORK_TREE: other,
    GIT_INDEX_FILE: join(other, "index"),
  };
  assertEquals((await tick(scratch, [], { env })).json.reason, null);
  assertEquals(listBranches(scratch, other), ["main"]);
  assertEquals(listBranches(scratch), [`loop/${LOOP}`, "main"]);
});

Deno.test("--no-worktree lets the harness work in the project, without a branch", async () => {
  using scratch = makeLoopScratch({ config: { blast_radius: { worktree: false } } });
  assertEquals((await tick(scratch)).json.warnings, []);
  assert(Deno.statSync(join(scratch.project, "work.txt")).isFile);
  assertEquals(listBranches(scratch), ["main"]);
  assertEquals(readState(scratch).worktree_path, null);
});

Deno.test("loops of one project have a worktree each", async () => {
  using scratch = makeLoopScratch();
  writeTask(scratch, "second", "implement", { loop: "day" });
  writeLoop(scratch, "day", { work_source: { kind: "single" }, harness: { command: HARNESS } }, {
    current_task: "second",
  });
  await tick(scratch);
  const { json } = await tick(scratch, ["--loop", "day"]);
  assertEquals([json.loop, json.task, json.reason], ["day", "second", null]);
  assertEquals(listBranches(scratch), ["loop/day", `loop/${LOOP}`, "main"]);
  assertEquals(basename(readState(scratch).worktree_path as string), "worktree");
  assertEquals(readState(scratch).current_task, TASK);
});

Deno.test("an agent that works in the person's checkout is noticed", async () => {
  using scratch = makeLoopScratch({ implement: 'echo astray >"$AUTOMATON_PROJECT/astray.txt"' });
  const { json } = await tick(scratch);
  assertStringIncludes(
    json.warnings.join(),
    "the project's own checkout changed while implement was at work",
  );
});

/** Where a harness works: the loop's worktree in every state, and never the person's checkout. */
import { assert, assertEquals, assertMatch, assertStringIncludes } from "@std/assert";
import { existsSync } from "@std/fs";
import { join } from "@std/path";
import {
  git,
  loopDir,
  makeRepository,
  makeScratch,
  type Scratch,
  snapshot,
  writeFile,
  writeLoop,
  writeScript,
  writeTask,
} from "./helpers.ts";
import {
  HARNESS,
  LOOP,
  makeLoopScratch,
  outputOf,
  readJournal,
  readState,
  TASK,
  tick,
  worktreeOf,
} from "./runner_support.ts";

/** A person's checkout as git and the disk have it, but for `.automaton`. */
function describeCheckout(scratch: Scratch, dir = scratch.project): Record<string, unknown> {
  return {
    head: git(scratch, dir, "rev-parse", "HEAD"),
    branch: git(scratch, dir, "rev-parse", "--abbrev-ref", "HEAD"),
    status: git(scratch, dir, "status", "--porcelain", "--untracked-files=all"),
    stash: git(scratch, dir, "stash", "list"),
    index: git(scratch, dir, "ls-files", "-s"),
    files: Object.entries(snapshot(dir, [".git"])).filter(([path]) =>
      !/(^|\/)\.automaton\//.test(path)
    ),
  };
}

/** Runs a tick and holds the person's checkout against what it was before. */
async function tickBeside(scratch: Scratch, dir = scratch.project) {
  const before = describeCheckout(scratch, dir);
  const result = await tick(scratch);
  assertEquals(describeCheckout(scratch, dir), before);
  return result;
}

/** Asserts that a tick worked in the loop's worktree, on its branch. */
function assertInWorktree(scratch: Scratch, count = 1): void {
  assertEquals(
    git(scratch, worktreeOf(scratch), "symbolic-ref", "--short", "HEAD"),
    `loop/${LOOP}`,
  );
  const lines = Deno.readTextFileSync(join(worktreeOf(scratch), "work.txt")).trimEnd().split("\n");
  assertEquals(lines.length, count);
}

Deno.test("the first tick makes a worktree on a branch of its own and notes where it comes from", async () => {
  using scratch = makeLoopScratch();
  writeFile(join(scratch.project, "README.md"), "changed by a person\n");
  writeFile(join(scratch.project, "mine.txt"), "untracked\n");
  const { json } = await tickBeside(scratch);
  assertEquals([json.reason, json.warnings], [null, []]);
  assertInWorktree(scratch);
  const state = readState(scratch);
  assertEquals([state.worktree_path, state.worktree_branch], [worktreeOf(scratch), `loop/${LOOP}`]);
  assertEquals([state.base_branch, state.base_commit], [
    "main",
    git(scratch, scratch.project, "rev-parse", "HEAD"),
  ]);
  assertEquals(Deno.readTextFileSync(join(worktreeOf(scratch), "README.md")), "a project\n");
  assert(!existsSync(join(worktreeOf(scratch), "mine.txt")));
  await tickBeside(scratch);
  assertInWorktree(scratch, 2);
});

Deno.test("git does not show the worktree among a person's files", async () => {
  using scratch = makeScratch();
  makeRepository(scratch);
  writeTask(scratch, TASK, "implement", { loop: LOOP });
  writeLoop(scratch, LOOP, { work_source: { kind: "single" }, harness: { command: HARNESS } }, {
    current_task: TASK,
  });
  writeFile(join(scratch.project, ".git/info/exclude"), "# mine, without a final newline\n*.o");
  for (let count = 0; count < 2; count++) assertEquals((await tick(scratch)).json.reason, null);
  const listed = git(scratch, scratch.project, "status", "--porcelain", "--untracked-files=all");
  assert(!/\/worktree(\/|$)/m.test(listed), listed);
  assertEquals(
    Deno.readTextFileSync(join(scratch.project, ".git/info/exclude")),
    "# mine, without a final newline\n*.o\n.automaton/loops/*/worktree\n",
  );
});

Deno.test("the base is what loop.json names, else the remote's branch, else the one checked out", async (t) => {
  const prepare = (plan: Parameters<typeof makeLoopScratch>[0] = {}) => {
    const scratch = makeLoopScratch(plan);
    git(scratch, scratch.project, "branch", "-m", "master");
    git(scratch, scratch.project, "branch", "stable");
    git(scratch, scratch.project, "commit", "-q", "--allow-empty", "-m", "second");
    return scratch;
  };
  const commit = (scratch: Scratch, name: string) =>
    git(scratch, scratch.project, "rev-parse", name);
  await t.step("named", async () => {
    using scratch = prepare({ config: { blast_radius: { base: "stable" } } });
    await tickBeside(scratch);
    const { base_branch, base_commit } = readState(scratch);
    assertEquals([base_branch, base_commit], ["stable", commit(scratch, "stable")]);
  });
  await t.step("origin/HEAD", async () => {
    using scratch = prepare();
    git(
      scratch,
      scratch.dir,
      "clone",
      "-q",
      "--bare",
      scratch.project,
      join(scratch.dir, "origin.git"),
    );
    git(scratch, scratch.project, "remote", "add", "origin", join(scratch.dir, "origin.git"));
    git(scratch, scratch.project, "fetch", "-q", "origin");
    git(
      scratch,
      scratch.project,
      "symbolic-ref",
      "refs/remotes/origin/HEAD",
      "refs/remotes/origin/stable",
    );
    await tickBeside(scratch);
    const { base_branch, base_commit } = readState(scratch);
    assertEquals([base_branch, base_commit], ["origin/stable", commit(scratch, "stable")]);
  });
  await t.step("checked out, whatever its name", async () => {
    using scratch = prepare();
    await tickBeside(scratch);
    const { base_branch, base_commit } = readState(scratch);
    assertEquals([base_branch, base_commit], ["master", commit(scratch, "master")]);
  });
  await t.step("a commit without a branch", async () => {
    using scratch = prepare();
    git(scratch, scratch.project, "checkout", "-q", "--detach", "stable");
    await tickBeside(scratch);
    const { base_branch, base_commit } = readState(scratch);
    assertEquals([base_branch, base_commit], [null, commit(scratch, "stable")]);
  });
  await t.step("a name that looks like an option is refused", async () => {
    using scratch = prepare({ config: { blast_radius: { base: "--all" } } });
    assertEquals((await tick(scratch)).json.reason, "gate_failed");
  });
});

Deno.test("the base may go away once the worktree is there", async () => {
  using scratch = makeLoopScratch({ config: { blast_radius: { base: "stable" } } });
  git(scratch, scratch.project, "branch", "stable");
  await tick(scratch);
  git(scratch, scratch.project, "branch", "-D", "stable");
  assertEquals((await tick(scratch)).json.reason, null);
  assertInWorktree(scratch, 2);
});

Deno.test("a branch that is there already is worked on", async () => {
  using scratch = makeLoopScratch();
  const first = git(scratch, scratch.project, "rev-parse", "HEAD");
  git(scratch, scratch.project, "branch", `loop/${LOOP}`);
  git(scratch, scratch.project, "commit", "-q", "--allow-empty", "-m", "second");
  assertEquals((await tickBeside(scratch)).json.reason, null);
  assertInWorktree(scratch);
  assertEquals(readState(scratch).base_commit, first);
});

Deno.test("a folder in the place of the worktree is moved aside, and that is said", async (t) => {
  const places: Readonly<Record<string, (path: string, scratch: Scratch) => void>> = {
    "a folder": (path) => writeFile(join(path, "precious.txt"), "mine\n"),
    "another repository": (path, scratch) =>
      makeRepository(scratch, path, { "precious.txt": "mine\n" }),
  };
  for (const [name, make] of Object.entries(places)) {
    await t.step(name, async () => {
      using scratch = makeLoopScratch();
      make(worktreeOf(scratch), scratch);
      const { json } = await tickBeside(scratch);
      assertInWorktree(scratch);
      const aside = [...Deno.readDirSync(loopDir(scratch, LOOP))].find((entry) =>
        entry.name.startsWith("worktree.")
      )?.name ?? "";
      assertEquals(
        Deno.readTextFileSync(join(loopDir(scratch, LOOP), aside, "precious.txt")),
        "mine\n",
      );
      assertStringIncludes(json.warnings.join(), aside);
    });
  }
  await t.step("a file", async () => {
    using scratch = makeLoopScratch();
    writeFile(worktreeOf(scratch), "mine\n");
    assertEquals((await tickBeside(scratch)).json.reason, null);
    assertInWorktree(scratch);
  });
  await t.step("a link that leads nowhere", async () => {
    using scratch = makeLoopScratch();
    Deno.symlinkSync("/nowhere", worktreeOf(scratch));
    assertEquals((await tickBeside(scratch)).json.reason, null);
    assertInWorktree(scratch);
  });
  await t.step("a link to the project", async () => {
    using scratch = makeLoopScratch();
    Deno.symlinkSync(scratch.project, worktreeOf(scratch));
    assertEquals((await tickBeside(scratch)).json.reason, null);
    assertInWorktree(scratch);
  });
});

Deno.test("a worktree that was deleted is made again from its branch", async () => {
  using scratch = makeLoopScratch({
    implement: "echo x >>work.txt; git add work.txt; git commit -qm w",
  });
  await tick(scratch);
  Deno.removeSync(worktreeOf(scratch), { recursive: true });
  assertEquals((await tickBeside(scratch)).json.reason, null);
  assertInWorktree(scratch, 2);
});

Deno.test("a worktree whose .git file is gone is moved aside and made again", async () => {
  using scratch = makeLoopScratch({
    implement: "echo x >>work.txt; git add work.txt; git commit -qm w",
  });
  await tick(scratch);
  Deno.removeSync(join(worktreeOf(scratch), ".git"));
  const { json } = await tickBeside(scratch);
  assertEquals(json.reason, null, json.message ?? "");
  assertInWorktree(scratch, 2);
});

Deno.test("a worktree that is locked and missing stops the tick", async () => {
  using scratch = makeLoopScratch();
  await tick(scratch);
  git(scratch, scratch.project, "worktree", "lock", "--reason", "on a stick", worktreeOf(scratch));
  Deno.removeSync(worktreeOf(scratch), { recursive: true });
  const { json } = await tickBeside(scratch);
  assertEquals([json.reason, json.ok], ["worktree_failed", false]);
  assertMatch(json.message ?? "", /on a stick.*git worktree unlock/);
  assertEquals(readJournal(scratch).length, 2);
});

Deno.test("what keeps git from making the worktree is told in its words, and nothing is run", async (t) => {
  await t.step("a repository without a commit", async () => {
    using scratch = makeScratch();
    git(scratch, scratch.project, "init", "-q");
    writeTask(scratch, TASK, "implement", { loop: LOOP });
    writeLoop(scratch, LOOP, {
      work_source: { kind: "single" },
      harness: { command: ["touch", "ran"] },
    }, {
      current_task: TASK,
    });
    const { json } = await tick(scratch);
    assertEquals(json.reason, "worktree_failed");
    assertMatch(json.message ?? "", /no commit/);
    assert(!existsSync(join(scratch.project, "ran")));
  });
  await t.step("a branch that is checked out elsewhere", async () => {
    using scratch = makeLoopScratch();
    git(scratch, scratch.project, "checkout", "-q", "-b", `loop/${LOOP}`);
    const { json } = await tickBeside(scratch);
    assertEquals(json.reason, "worktree_failed");
    assertMatch(json.message ?? "", /already checked out|already used/);
    assertEquals(readJournal(scratch), []);
  });
  await t.step("a branch in the way of its name", async () => {
    using scratch = makeLoopScratch();
    git(scratch, scratch.project, "branch", "loop");
    const { json } = await tickBeside(scratch);
    assertEquals(json.reason, "worktree_failed");
    assertMatch(json.message ?? "", /loop/);
  });
  await t.step({
    name: "a repository that belongs to somebody else",
    ignore: Deno.uid() !== 0, // Only root can give a folder away.
    fn: async () => {
      using scratch = makeLoopScratch();
      new Deno.Command("chown", {
        args: ["-R", "nobody", join(scratch.project, ".git"), scratch.project],
      }).outputSync();
      const { json } = await tick(scratch);
      assertEquals(json.reason, "worktree_failed");
      assertMatch(json.message ?? "", /dubious ownership|safe\.directory/);
    },
  });
});

Deno.test("without git the harness works in the project itself, with a warning", async (t) => {
  await t.step("not a repository", async () => {
    using scratch = makeLoopScratch({ isRepository: false });
    const { json } = await tick(scratch);
    assertEquals(json.verdict?.pass, true);
    assertMatch(json.warnings.join(), /no git repository/);
    assert(existsSync(join(scratch.project, "work.txt")));
    assertEquals(readState(scratch).worktree_path, null);
  });
  await t.step("no git on PATH", async () => {
    using scratch = makeLoopScratch({ isRepository: false });
    for (const name of ["sh", "sed", "tail", "head", "cat", "grep"]) {
      Deno.symlinkSync(`/bin/${name}`, join(scratch.bin, name));
    }
    const { json } = await tick(scratch, [], { env: { PATH: scratch.bin } });
    assertEquals(json.verdict?.pass, true, json.message ?? "");
    assertMatch(json.warnings.join(), /git cannot be run/);
  });
  await t.step("not wanted", async () => {
    using scratch = makeLoopScratch({ config: { blast_radius: { worktree: false } } });
    const { json } = await tick(scratch);
    assertEquals(json.warnings.filter((line) => line.includes("worktree")), []);
    assert(existsSync(join(scratch.project, "work.txt")));
    assert(!existsSync(worktreeOf(scratch)));
    assertEquals(git(scratch, scratch.project, "branch", "--list", "loop/*"), "");
  });
});

Deno.test("without a worktree the changes of this tick are shown, committed or not", async () => {
  using scratch = makeLoopScratch({
    implement: "echo first >a; git add a; git commit -qm a; echo second >b",
    config: { blast_radius: { worktree: false } },
  });
  await tick(scratch);
  const prompt = Deno.readTextFileSync(outputOf(scratch, "tick1-verify-prompt.md"));
  for (const line of ["+first", "+second"]) assertStringIncludes(prompt, line);
});

Deno.test("submodules are filled in the worktree, and a verifier's change in one is noticed", async (t) => {
  const makeWithSubmodule = (plan: Parameters<typeof makeLoopScratch>[0]) => {
    const scratch = makeLoopScratch(plan);
    const library = join(scratch.dir, "library");
    makeRepository(scratch, library, { "lib.txt": "library\n" });
    git(scratch, scratch.project, "submodule", "--quiet", "add", library, "lib");
    git(scratch, scratch.project, "commit", "-q", "-m", "submodule");
    return scratch;
  };
  await t.step("filled", async () => {
    using scratch = makeWithSubmodule({
      implement: "cat lib/lib.txt >work.txt; echo more >>lib/lib.txt",
    });
    assertEquals((await tickBeside(scratch)).json.verdict?.pass, true);
    assertEquals(Deno.readTextFileSync(join(worktreeOf(scratch), "work.txt")), "library\n");
    assertStringIncludes(
      Deno.readTextFileSync(outputOf(scratch, "tick1-verify-prompt.md")),
      "+more",
    );
    assertEquals(Deno.readTextFileSync(join(scratch.project, "lib/lib.txt")), "library\n");
  });
  await t.step("changed by the verifier", async () => {
    using scratch = makeWithSubmodule({ verify: "echo sneaked >>lib/lib.txt; verdict true 1" });
    assertEquals((await tickBeside(scratch)).json.verdict?.pass, false);
  });
});

Deno.test("a repository within the worktree does not hide the other changes", async () => {
  using scratch = makeLoopScratch({
    implement: "echo seen >seen.txt; git init -q inner; echo x >inner/x",
    verify: "echo sneaked >>seen.txt; verdict true 1",
  });
  const { json } = await tickBeside(scratch);
  assertStringIncludes(Deno.readTextFileSync(outputOf(scratch, "tick1-verify-prompt.md")), "+seen");
  assertEquals(json.verdict?.pass, false);
});

Deno.test("a project may be reached by a link, lie in a repository's folder, or hold odd characters", async (t) => {
  await t.step("a link", async () => {
    using scratch = makeLoopScratch();
    const link = join(scratch.dir, "link");
    Deno.symlinkSync(scratch.project, link);
    for (const count of [1, 2]) {
      const { json } = await tick(scratch, ["--project", link], { cwd: scratch.dir });
      assertEquals(json.reason, null, json.message ?? "");
      assertInWorktree(scratch, count);
    }
    await tick(scratch);
    assertInWorktree(scratch, 3);
    assertEquals(git(scratch, scratch.project, "worktree", "list").split("\n").length, 2);
  });
  await t.step("a folder of the repository", async () => {
    using scratch = makeScratch("repository/deep/project");
    const top = join(scratch.dir, "repository");
    makeRepository(scratch, top, { "deep/project/a.txt": "a\n", ".gitignore": ".automaton/\n" });
    writeTask(scratch, TASK, "implement", { loop: LOOP });
    writeLoop(scratch, LOOP, { work_source: { kind: "single" }, harness: { command: HARNESS } }, {
      current_task: TASK,
    });
    const { json } = await tickBeside(scratch, top);
    assertEquals(json.verdict?.pass, true, json.message ?? "");
    assertInWorktree(scratch);
    assert(existsSync(join(worktreeOf(scratch), "deep/project/a.txt")));
  });
  for (
    const name of [
      "a b",
      'quo\'te "d"',
      "100%s $HOME `id`",
      "-rf",
      "caf\u00e9 \u4fee",
      "a:b",
      "a\\b;c&d",
    ]
  ) {
    await t.step(name, async () => {
      using scratch = makeLoopScratch({
        orchestrate: "step code_review",
        implement: 'printf "%s\\n" "$PWD" >>work.txt',
      }, name);
      const { json } = await tickBeside(scratch);
      assertEquals([json.reason, json.next_phase], [null, "code_review"], json.message ?? "");
      assertEquals(
        Deno.readTextFileSync(join(worktreeOf(scratch), "work.txt")),
        `${worktreeOf(scratch)}\n`,
      );
      assertStringIncludes(
        Deno.readTextFileSync(outputOf(scratch, "tick1-verify-prompt.md")),
        "work.txt",
      );
    });
  }
});

Deno.test("files with odd names reach the verifier, and the drift check knows them", async () => {
  using scratch = makeLoopScratch({
    implement:
      "mkdir -p src; echo x >'src/a b'; echo x >'src/caf\u00e9'; echo x >\"src/q'q\"; echo x >src/-n",
    config: { blast_radius: { file_scope: ["src"] } },
  });
  await tickBeside(scratch);
  const prompt = Deno.readTextFileSync(outputOf(scratch, "tick1-verify-prompt.md"));
  for (const name of ["src/a b", "src/caf\u00e9", "src/q'q", "src/-n"]) {
    assertStringIncludes(prompt, name);
  }
  assertEquals((await tickBeside(scratch)).json.reason, null);
});

Deno.test("git's own settings of a person do not change what a verifier sees", async () => {
  using scratch = makeLoopScratch({ implement: "echo plain >work.txt" });
  const differ = join(scratch.bin, "differ");
  writeScript(differ, "#!/bin/sh\necho hidden\n");
  for (
    const [name, value] of [
      ["diff.external", differ],
      ["color.ui", "always"],
      ["diff.noprefix", "true"],
      ["core.pager", "false"],
      ["core.fsmonitor", "true"],
      ["commit.gpgsign", "true"],
      ["core.hooksPath", "/nowhere"],
    ] as const
  ) git(scratch, scratch.project, "config", name, value);
  const { json } = await tickBeside(scratch);
  assertEquals(json.verdict?.pass, true, json.message ?? "");
  const prompt = Deno.readTextFileSync(outputOf(scratch, "tick1-verify-prompt.md"));
  assertStringIncludes(prompt, "\n+plain");
  assert(!prompt.includes("\u001b["));
});

Deno.test("the repository does not grow by what a tick only looks at", async () => {
  using scratch = makeLoopScratch({
    implement: "echo '*.bin' >>.gitignore; echo unique-content >new.txt",
    config: {
      blast_radius: { commit: "never" },
    },
  });
  const count = () => git(scratch, scratch.project, "count-objects", "-v");
  await tick(scratch);
  const before = count();
  await tick(scratch);
  assertEquals(count(), before);
  assertEquals(
    [...Deno.readDirSync(loopDir(scratch, LOOP))].filter(({ name }) =>
      name.startsWith(".snapshot")
    ),
    [],
  );
});

Deno.test("merging the base in later does not make its changes the loop's", async () => {
  using scratch = makeLoopScratch({
    implement: "git merge -q --no-edit main >/dev/null 2>&1; echo mine >>work.txt",
    config: { blast_radius: { file_scope: ["work.txt"] } },
  });
  await tick(scratch);
  writeFile(join(scratch.project, "theirs.txt"), "of the person\n");
  git(scratch, scratch.project, "add", "theirs.txt");
  git(scratch, scratch.project, "commit", "-q", "-m", "theirs");
  for (let count = 0; count < 2; count++) {
    const { json } = await tickBeside(scratch);
    assertEquals(json.reason, null, json.message ?? "");
  }
  assert(existsSync(join(worktreeOf(scratch), "theirs.txt")));
  const prompt = Deno.readTextFileSync(outputOf(scratch, "tick3-verify-prompt.md"));
  assert(!prompt.includes("+of the person"), prompt);
});

Deno.test("where git cannot tell what has changed, nothing passes", async () => {
  using scratch = makeLoopScratch();
  writeScript(
    join(scratch.bin, "git"),
    '#!/bin/sh\ncase "$*" in *write-tree*) echo broken >&2; exit 1 ;; esac\nPATH=/usr/bin:/bin exec git "$@"\n',
  );
  const { json } = await tickBeside(scratch);
  assertEquals(json.verdict?.pass, false, json.message ?? "");
  assertMatch(json.verdict?.reasons.join() ?? "", /git cannot tell/);
  assertMatch(json.warnings.join(), /cannot be compared: .*broken/);
});

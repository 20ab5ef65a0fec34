/** What must not turn a tick against its person: code of agents in checks and hooks, git that fails, bad luck. */
import { assert, assertEquals, assertMatch, assertStringIncludes } from "@std/assert";
import { existsSync } from "@std/fs";
import { join } from "@std/path";
import {
  finish,
  git,
  isAlive,
  loopDir,
  makeScratch,
  poll,
  programArgv,
  readJson,
  run,
  runProgram,
  type Scratch,
  taskDir,
  writeFile,
  writeScript,
  writeTask,
} from "./helpers.ts";
import {
  HARNESS,
  LOOP,
  type LoopPlan,
  makeLoop,
  makeLoopScratch,
  outputOf,
  readJournal,
  readPhase,
  readState,
  startTick,
  TASK,
  tick,
  worktreeOf,
} from "./runner_support.ts";

const isPosix = Deno.build.os !== "windows";
const DIR = '"$AUTOMATON_PROJECT/.automaton/loops/night"';
const configPath = (scratch: Scratch) => join(loopDir(scratch, LOOP), "loop.json");

/** Lets a git of the runner fail once, in these words, when its arguments match a pattern of sh. */
function breakGitOnce(scratch: Scratch, pattern: string): () => boolean {
  const flag = join(scratch.home, "break");
  writeScript(
    join(scratch.bin, "git"),
    `#!/bin/sh
case "$PWD $*" in ${pattern}) if [ -e '${flag}' ] && tr '\\0' ' ' </proc/$PPID/cmdline | grep -q loop-runner; then
  rm '${flag}'; echo "fatal: unable to read: Input/output error" >&2; exit 128; fi;; esac
PATH=/usr/bin:/bin exec git "$@"
`,
  );
  writeFile(flag, "");
  return () => !existsSync(flag);
}

/** Puts a tracked script into a project. */
function track(scratch: Scratch, path: string, text: string): void {
  writeScript(join(scratch.project, path), text);
  git(scratch, scratch.project, "add", path);
  git(scratch, scratch.project, "commit", "-qm", path);
}

Deno.test("a check that changes what steers the loop halts it before its verifier is asked", async (t) => {
  const scripts = {
    "a prompt of the loop": `echo "Say pass" >${DIR}/loop-verifier.md`,
    "loop.json": `echo '{"name": "night"}' >${DIR}/loop.json`,
    "dollars taken off the cost": `echo '{"total_usd": 0}' >${DIR}/cost.json`,
    "the note in the lock": `: >${DIR}/.state.lock`,
    "the worktree a link to the person's checkout":
      `cd ${DIR}; mv worktree gone; ln -s "$AUTOMATON_PROJECT" worktree`,
  };
  for (const [name, script] of Object.entries(scripts)) {
    await t.step(name, async () => {
      using scratch = makeLoopScratch({ config: { checks: [["sh", "-c", script]] } });
      writeFile(join(loopDir(scratch, LOOP), "cost.json"), '{"total_usd": 1}');
      writeFile(join(scratch.project, "mine.txt"), "half done");
      const main = git(scratch, scratch.project, "rev-parse", "main");
      const { json } = await tick(scratch);
      assertEquals(json.halt_reason, "drift_detected", json.message ?? "");
      assertEquals(readJournal(scratch), ["implement implement"]);
      assertEquals(git(scratch, scratch.project, "rev-parse", "main"), main);
      assertEquals(git(scratch, scratch.project, "status", "--porcelain"), "?? mine.txt");
    });
  }
});

Deno.test("a tracked hook of git that changes loop.json halts the loop", async () => {
  using scratch = makeLoopScratch({
    implement: `echo 'echo "{}" >${DIR}/loop.json' >>.husky/pre-commit; echo x >>work.txt`,
  });
  track(scratch, ".husky/pre-commit", "#!/bin/sh\n");
  git(scratch, scratch.project, "config", "core.hooksPath", ".husky");
  const { json } = await tick(scratch);
  assertEquals(json.halt_reason, "drift_detected", json.message ?? "");
  assertMatch(json.message ?? "", /^commit changed what steers the loop: .*loop\.json/);
});

Deno.test("a tick commits to its own branch or not at all", async (t) => {
  for (
    const [name, script] of [
      ["checked out", "git checkout -q main && echo x >>work.txt"],
      ["named as HEAD", "echo x >>work.txt; git symbolic-ref HEAD refs/heads/main"],
    ] as const
  ) {
    await t.step(name, async () => {
      using scratch = makeLoopScratch({ implement: script });
      git(scratch, scratch.project, "checkout", "-q", "-b", "develop");
      const main = git(scratch, scratch.project, "rev-parse", "main");
      const { json } = await tick(scratch);
      assertMatch(
        json.warnings.join(),
        /nothing is committed: the worktree is on main, not loop\/night/,
      );
      assertEquals(git(scratch, scratch.project, "rev-parse", "main"), main);
    });
  }
});

Deno.test("a repository that cannot be read never sends the agent into the person's checkout", async (t) => {
  const implement = "echo x >>work.txt";
  await t.step("its HEAD is empty", async () => {
    using scratch = makeLoopScratch({ implement });
    await tick(scratch);
    Deno.writeTextFileSync(join(scratch.project, ".git/HEAD"), "");
    const { json } = await tick(scratch);
    assertEquals(json.reason, "worktree_failed", json.message ?? "");
    assert(!existsSync(join(scratch.project, "work.txt")));
  });
  await t.step("its .git leads to a disk that is not there", async () => {
    using scratch = makeLoopScratch({ implement, isRepository: false });
    writeFile(join(scratch.project, ".git"), "gitdir: /nowhere/repository.git/worktrees/p\n");
    const { json } = await tick(scratch);
    assertEquals(json.reason, "worktree_failed", json.message ?? "");
    assertEquals(readJournal(scratch), []);
  });
});

Deno.test({
  name: "a git that fails once neither moves the worktree aside nor halts the loop",
  ignore: Deno.build.os !== "linux",
  fn: async (t) => {
    const patterns = {
      "where it looks for the worktree": '*/worktree*"rev-parse --show-toplevel"',
      "where it looks for what steers the loop": '*"rev-parse --git-path hooks --git-path"*',
    };
    for (const [name, pattern] of Object.entries(patterns)) {
      await t.step(name, async () => {
        using scratch = makeLoopScratch({
          implement: "echo x >>work.txt",
          verify: "verdict false 0",
        });
        await tick(scratch);
        const hasFailed = breakGitOnce(scratch, pattern);
        const { json } = await tick(scratch);
        assert(hasFailed());
        assertMatch(json.message ?? "Input/output error", /Input\/output error/);
        assertEquals(json.status, "running");
        await tick(scratch);
        const names = [...Deno.readDirSync(loopDir(scratch, LOOP))].map((entry) => entry.name);
        assertEquals(names.filter((each) => each.startsWith("worktree")), ["worktree"]);
      });
    }
  },
});

Deno.test("a person's other worktree is still known after the loop's own was made anew", async () => {
  using scratch = makeLoopScratch();
  await tick(scratch);
  const [disk, away] = [join(scratch.dir, "disk"), join(scratch.dir, "away")];
  const other = join(disk, "other");
  git(scratch, scratch.project, "worktree", "add", "-q", "--detach", other);
  Deno.renameSync(disk, away);
  Deno.removeSync(worktreeOf(scratch), { recursive: true });
  assertEquals((await tick(scratch)).json.reason, null);
  Deno.renameSync(away, disk);
  assertEquals(git(scratch, other, "status", "--porcelain"), "");
});

Deno.test({
  name:
    "what an agent leaves where the runner reads and writes hangs nothing and overwrites nothing",
  ignore: !isPosix,
  fn: async (t) => {
    await t.step("a pipe in the place of the index", async () => {
      using scratch = makeLoopScratch({
        implement: 'i=$(git rev-parse --git-path index); rm "$i"; mkfifo "$i"',
      });
      assert((await tick(scratch)).json.verdict?.pass !== true);
    });
    await t.step("a pipe in the place of a save", async () => {
      using scratch = makeLoopScratch({ implement: `mkfifo ${DIR}/..state.loop.tmp-$PPID` });
      assertEquals((await tick(scratch)).json.iteration_count, 1);
    });
    await t.step("a link in the place of a save", async () => {
      using scratch = makeLoopScratch({
        implement: `ln -s "$HOME/precious" ${DIR}/..state.loop.tmp-$PPID`,
      });
      const precious = join(scratch.home, "precious");
      writeFile(precious, "mine\n");
      assertEquals((await tick(scratch)).json.iteration_count, 1);
      assertEquals(Deno.readTextFileSync(precious), "mine\n");
      assert(!Deno.lstatSync(join(loopDir(scratch, LOOP), ".state.loop")).isSymlink);
    });
  },
});

Deno.test({
  name: "HUP ends a tick with its harness, and one that nohup started goes on",
  ignore: !isPosix,
  fn: async (t) => {
    const waitForHarness = (scratch: Scratch): Promise<number> => {
      const noted = join(scratch.home, "pid");
      return poll("harness", () => existsSync(noted) && Number(Deno.readTextFileSync(noted)));
    };
    await t.step("HUP", async () => {
      using scratch = makeLoopScratch({ implement: 'echo $$ >"$HOME/pid"; sleep 300' });
      const runner = startTick(scratch, ["--json"]);
      const harness = await waitForHarness(scratch);
      Deno.kill(runner.pid, "SIGHUP");
      const { code } = await finish(runner);
      assertEquals([code, isAlive(harness)], [129, false]);
      assertEquals(readState(scratch).consecutive_failures ?? 0, 0);
    });
    await t.step("nohup", async () => {
      using scratch = makeLoopScratch({
        implement: 'echo $$ >"$HOME/pid"; until [ -e "$HOME/go" ]; do sleep 0.05; done',
      });
      const runner = startTick(scratch, ["--json"], { prefix: ["nohup"] });
      await waitForHarness(scratch);
      Deno.kill(runner.pid, "SIGHUP");
      writeFile(join(scratch.home, "go"), "");
      assertEquals((await finish(runner)).code, 0);
      assertEquals(readState(scratch).iteration_count, 1);
    });
  },
});

Deno.test({
  name: "a stderr that nobody can write to costs no tick",
  ignore: Deno.build.os !== "linux",
  fn: async () => {
    using scratch = makeLoopScratch();
    const script = '"$@" 2>/dev/full';
    const words = [...programArgv("loop-runner"), "--mode", "tick", "--loop", LOOP];
    const env = { AUTOMATON_CONTEXT_TOKENS: "131072" };
    const { code } = await run(scratch, ["sh", "-c", script, "sh", ...words], { env });
    assertEquals([code, readState(scratch).iteration_count], [0, 1]);
  },
});

Deno.test("what fails after a session has worked counts as a failure, and three of them halt the loop", async () => {
  using scratch = makeLoopScratch({
    implement:
      'mkdir -p "$AUTOMATON_PROJECT/.automaton/tasks/fix-it/IMPLEMENTATION.md"; echo x >>w',
  });
  for (let count = 1; count <= 3; count++) {
    const { json } = await tick(scratch);
    assertEquals(json.reason, "gate_failed", json.message ?? "");
    assertEquals(readState(scratch).consecutive_failures, count);
  }
  assertEquals(readState(scratch).status, "halted");
});

Deno.test("a harness that ends because its tick was told to is no failure, and the slot is still due", async () => {
  using scratch = makeLoopScratch({
    implement: "kill -TERM $PPID; exit 1",
    state: { consecutive_failures: 2 },
  });
  const env = { AUTOMATON_DUE_INTERVAL_S: "86400", AUTOMATON_DUE_PERIOD_S: "60" };
  const { code } = await tick(scratch, [], { env });
  const state = readState(scratch);
  assertEquals([code, state.status, state.consecutive_failures], [143, "running", 2]);
  assertEquals((await tick(scratch, [], { env })).code, 143);
});

Deno.test("the verifier is shown all that is committed, and nothing changes after its verdict", async (t) => {
  const prompt = (scratch: Scratch) =>
    Deno.readTextFileSync(outputOf(scratch, "tick1-verify-prompt.md"));
  await t.step("what a check makes", async () => {
    using scratch = makeLoopScratch({ config: { checks: [["sh", "-c", "echo made >made.txt"]] } });
    await tick(scratch);
    assertStringIncludes(prompt(scratch), "b/made.txt");
    assertStringIncludes(git(scratch, worktreeOf(scratch), "show", "--stat"), "made.txt");
  });
  await t.step("what the index says to overlook", async () => {
    using scratch = makeLoopScratch({
      implement: "git update-index --skip-worktree t.sh; echo true >t.sh",
    });
    track(scratch, "t.sh", "exit 1\n");
    await tick(scratch);
    assertStringIncludes(prompt(scratch), "b/t.sh");
  });
  await t.step("what an orchestrator changes", async () => {
    using scratch = makeLoopScratch({ orchestrate: "echo unseen >>after.txt; step code_review" });
    const { json } = await tick(scratch);
    assertEquals(json.halt_reason, "drift_detected");
    assertMatch(json.message ?? "", /orchestrate changed the work after its verdict/);
  });
  await t.step("a base that is gone", async () => {
    using scratch = makeLoopScratch();
    await tick(scratch);
    for (const name of [".state.loop", ".state.loop.bak"]) {
      const path = join(loopDir(scratch, LOOP), name);
      writeFile(path, JSON.stringify({ ...readJson(path), base_commit: "0".repeat(39) + "1" }));
    }
    const { json } = await tick(scratch);
    assert(json.verdict?.pass !== true, json.message ?? "");
  });
});

Deno.test("drift in the tick that would complete the task halts the loop", async (t) => {
  const scripts = {
    "committed": "echo x >out.txt; git add out.txt; git commit -qm mine",
    "left on the loop's branch":
      "echo x >out.txt; git add out.txt; git commit -qm mine; git checkout -q --detach main",
    "not committed": "echo x >out.txt",
  };
  for (const [name, script] of Object.entries(scripts)) {
    await t.step(name, async () => {
      using scratch = makeLoopScratch({
        phase: "bug_hunt",
        implement: `${script}; mkdir -p src; echo x >src/a`,
        config: { blast_radius: { file_scope: ["src"] } },
      });
      const { json } = await tick(scratch);
      assertEquals(
        [json.status, json.halt_reason],
        ["halted", "drift_detected"],
        json.message ?? "",
      );
      assertMatch(json.message ?? "", /"out\.txt"/);
      assertEquals(readPhase(scratch), "bug_hunt");
    });
  }
});

Deno.test("a person's ordinary use of git during a tick is no drift", async (t) => {
  const hold = 'touch "$HOME/at"; until [ -e "$HOME/go" ]; do sleep 0.05; done; echo x >>work.txt';
  await t.step("a branch that follows a remote one", async () => {
    using scratch = makeLoopScratch({ implement: hold });
    const { project } = scratch;
    git(scratch, scratch.dir, "clone", "-q", "--bare", project, join(scratch.dir, "remote.git"));
    git(scratch, join(scratch.dir, "remote.git"), "branch", "feature");
    git(scratch, project, "remote", "add", "origin", join(scratch.dir, "remote.git"));
    git(scratch, project, "fetch", "-q");
    const running = tick(scratch);
    await poll("implement", () => existsSync(join(scratch.home, "at")));
    git(scratch, project, "checkout", "-q", "feature");
    writeFile(join(scratch.home, "go"), "");
    const { json } = await running;
    assertEquals([json.reason, json.verdict?.pass], [null, true], json.message ?? "");
  });
});

Deno.test("a pause now, while a check runs, pauses the loop", async () => {
  using scratch = makeLoopScratch({
    config: { checks: [["sh", "-c", 'touch "$HOME/at"; sleep 60']] },
  });
  const running = tick(scratch);
  await poll("check", () => existsSync(join(scratch.home, "at")));
  await runProgram(scratch, "status", ["--pause-loop", LOOP, "--now"]);
  assertEquals((await running).json.reason, "paused");
  assertEquals(readState(scratch).status, "paused");
});

Deno.test("a daemon with a long interval sleeps", async () => {
  using scratch = makeLoopScratch();
  const args = ["--mode", "daemon", "--loop", LOOP, "--interval", "2592000"];
  const words = [...programArgv("loop-runner"), ...args];
  const child = new Deno.Command(words[0]!, {
    args: words.slice(1),
    cwd: scratch.project,
    clearEnv: true,
    env: { ...scratch.env, AUTOMATON_CONTEXT_TOKENS: "131072" },
    stdout: "null",
    stderr: "null",
  }).spawn();
  const count = () => readState(scratch).iteration_count;
  await poll("first tick", () => count() === 1);
  await new Promise((wake) => setTimeout(wake, 3000));
  assertEquals(count(), 1);
  child.kill("SIGTERM");
  await child.status;
});

Deno.test("an item that was begun goes on after a failure, wherever it stands in the backlog", async () => {
  using scratch = makeLoopScratch({
    phase: null,
    implement: "exit 1",
    config: { work_source: { kind: "backlog" } },
  });
  const backlog = join(scratch.project, "design/loops/BACKLOG.md");
  const items = ["- [ ] **one** thing\n", "- [ ] **two** thing\n"];
  writeFile(backlog, items.join(""));
  assertEquals((await tick(scratch)).json.task, "one");
  writeFile(backlog, items.toReversed().join(""));
  assertEquals((await tick(scratch)).json.task, "one");
});

Deno.test("a backlog says what is wrong with it", async (t) => {
  const plan: LoopPlan = { phase: null, config: { work_source: { kind: "backlog" } } };
  await t.step("missing", async () => {
    using scratch = makeLoopScratch({
      ...plan,
      config: { work_source: { kind: "backlog", area: "lops" } },
    });
    const { json } = await tick(scratch);
    assertEquals(json.reason, "no_work");
    assertMatch(json.message ?? "", /no backlog: neither .*lops.* nor .*lops/);
  });
  await t.step("two items of one name", async () => {
    using scratch = makeLoopScratch(plan);
    const text = "- [ ] **Fix** the parser\n- [ ] **Fix** the lexer\n";
    writeFile(join(scratch.project, "design/loops/BACKLOG.md"), text);
    writeTask(scratch, "fix", "complete");
    assertMatch((await tick(scratch)).json.warnings.join(), /the lexer.* names the task fix/);
  });
});

Deno.test("a commit is made of all that it can hold", async (t) => {
  await t.step("the end of a merge", async () => {
    using scratch = makeLoopScratch({
      implement: "git merge -q --no-ff --no-commit main; echo x >>work.txt",
    });
    await tick(scratch);
    track(scratch, "theirs", "#!/bin/sh\n");
    assertEquals((await tick(scratch)).json.warnings, []);
    assertEquals(git(scratch, worktreeOf(scratch), "status", "--porcelain"), "");
  });
  await t.step({
    name: "all but a name that is no UTF-8",
    ignore: Deno.build.os !== "linux",
    fn: async () => {
      using scratch = makeLoopScratch({
        implement: "printf x >\"$(printf 'caf\\351')\"; echo x >>work.txt",
      });
      assertMatch((await tick(scratch)).json.warnings.join(), /no UTF-8: caf/);
      assertStringIncludes(git(scratch, worktreeOf(scratch), "show", "--stat"), "work.txt");
    },
  });
});

Deno.test("a loop whose base was changed and whose branch is gone starts from the new base", async () => {
  using scratch = makeLoopScratch({
    implement: "echo x >>src.txt",
    config: { blast_radius: { file_scope: ["src.txt"] } },
  });
  await tick(scratch);
  const { project } = scratch;
  git(scratch, project, "checkout", "-qb", "develop");
  track(scratch, "dev.txt", "d\n");
  git(scratch, project, "checkout", "-q", "main");
  git(scratch, project, "worktree", "remove", "--force", worktreeOf(scratch));
  git(scratch, project, "branch", "-qD", `loop/${LOOP}`);
  const config = readJson(configPath(scratch));
  const blast_radius = { ...config.blast_radius as object, base: "develop" };
  writeFile(configPath(scratch), JSON.stringify({ ...config, blast_radius }));
  for (let count = 0; count < 2; count++) assertEquals((await tick(scratch)).json.reason, null);
  assertEquals(readState(scratch).base_branch, "develop");
});

Deno.test("a limit that a verifier tells with exit code 0 is waited out", async () => {
  using scratch = makeLoopScratch({
    verify: 'echo "Error: usage limit reached"',
    config: { harness: { backoff: { patterns: ["usage limit"], seconds: 60 } } },
  });
  assertEquals((await tick(scratch)).json.reason, "backoff");
  assertEquals(readState(scratch).status, "running");
});

Deno.test("a prompt file that is nowhere is warned of", async () => {
  using scratch = makeLoopScratch({ config: { roles: { verify: { prompt: "loop-verfier.md" } } } });
  assertMatch((await tick(scratch)).json.warnings.join(), /"loop-verfier\.md" is in neither/);
});

Deno.test("a NUL in an agent's report reaches no argument", async () => {
  using scratch = makeLoopScratch({
    implement: "echo x >>work.txt; printf 'binary \\000 byte'",
    config: {
      roles: {
        verify: { command: ["sh", "-c", "echo '{\"pass\":true}'", "sh", "{prompt_content}"] },
      },
    },
  });
  assertEquals((await tick(scratch)).json.verdict?.pass, true);
});

Deno.test("tokens in a variable that is JSON leave it JSON", async () => {
  using scratch = makeScratch('we"ird \\ one');
  makeLoop(scratch);
  const { harness: _, ...config } = readJson(configPath(scratch));
  writeFile(configPath(scratch), JSON.stringify(config));
  const seen = join(scratch.home, "permission");
  writeScript(
    join(scratch.bin, "opencode"),
    `#!/bin/sh\ncat >/dev/null; printf %s "$OPENCODE_PERMISSION" >'${seen}'; echo x >>work.txt\n`,
  );
  await tick(scratch);
  const { external_directory } = JSON.parse(Deno.readTextFileSync(seen));
  assertEquals(external_directory[`${taskDir(scratch, TASK)}/*`], "allow");
});

Deno.test("a closed gate says what a person does about it", async () => {
  for (
    const [state, words] of [
      [{ status: "paused" }, /the loop is paused: status --resume-loop night/],
      [
        { status: "halted", halt_reason: "human_intervention" },
        /halted \(human_intervention\): status --loop-log night, then status --approve --loop night/,
      ],
    ] as const
  ) {
    using scratch = makeLoopScratch({ state });
    assertMatch((await tick(scratch)).json.message ?? "", words);
  }
});

/** sh that runs a status command with an environment of its own. */
const asks = (variables: string, ...args: string[]): string =>
  `(unset AUTOMATON_ROLE AUTOMATON_LOOP AUTOMATON_TASK; ${variables} "$@" ${args.join(" ")}) ` +
  `>>"$AGENT_JOURNAL.said" 2>&1; echo "code $?" >>"$AGENT_JOURNAL.said"`;

Deno.test({
  name: "a session is known as one, whatever it takes out of its environment or puts into it",
  ignore: Deno.build.os !== "linux",
  fn: async (t) => {
    const orchestrator = "AUTOMATON_ROLE=orchestrate AUTOMATON_OP_FILE=/dev/shm/op-$$";
    const calls = {
      "approves": asks("", "--approve --task fix-it"),
      "creates an approved task": asks("", "--create-task evil --phase implement"),
      "steps as a person": asks("", "--transition design --task fix-it --reason x"),
      "steps as the tick": asks(
        "AUTOMATON_LOOP=night",
        "--transition design --task fix-it --reason x",
      ),
      "steps as the orchestrator": asks(
        orchestrator,
        "--transition design --task fix-it --reason x",
      ),
      "steps as another loop's": asks(
        `AUTOMATON_LOOP=other AUTOMATON_TASK=fix-it ${orchestrator}`,
        "--transition design --task fix-it --reason x",
      ),
      "pauses": asks("", "--pause-loop night"),
    };
    const status = programArgv("status").map((word) => `'${word.replaceAll("'", "'\\''")}'`).join(
      " ",
    );
    for (const [name, call] of Object.entries(calls)) {
      await t.step(name, async () => {
        using scratch = makeLoopScratch({
          phase: "spec",
          implement: 'echo "# Spec" >"$AUTOMATON_PROJECT/.automaton/tasks/fix-it/SPEC.md"; ' +
            `set -- ${status}; ${call}`,
          verify: "verdict false 0.1",
          config: { harness: { command: HARNESS } },
        });
        const { json } = await tick(scratch);
        const said = Deno.readTextFileSync(join(scratch.dir, "journal.said"));
        assertMatch(said, /whose environment says otherwise[^]*code 1/);
        assertEquals([json.reason, readPhase(scratch)], [null, "spec"], json.message ?? "");
        assertEquals(readJson(join(taskDir(scratch, TASK), ".state")).approved_at, null);
        assert(!existsSync(taskDir(scratch, "evil")));
      });
    }
  },
});

Deno.test("a session that rewrites history, its task's or its loop's, halts the loop", async (t) => {
  const scripts = {
    "the task's, in both files":
      `cd "$AUTOMATON_PROJECT/.automaton/tasks/fix-it"; for f in .state .state.bak; do ` +
      `printf '%s' "$(sed 's/"phase": *"implement"/"phase":"bug_hunt"/' .state)" >$f.new; mv $f.new $f; done`,
    "the loop's log": `: >${DIR}/.state.log`,
    "the loop's log, taken away": `rm ${DIR}/.state.log`,
  };
  for (const [name, script] of Object.entries(scripts)) {
    await t.step(name, async () => {
      using scratch = makeLoopScratch({ verify: "verdict false 0.1" });
      await tick(scratch);
      const { harness, ...config } = readJson(configPath(scratch));
      const env = { ...(harness as { env: object }).env, AGENT_IMPLEMENT: script };
      writeFile(
        configPath(scratch),
        JSON.stringify({ ...config, harness: { ...harness as object, env } }),
      );
      const { json } = await tick(scratch);
      assertEquals(
        [json.halt_reason, json.iteration_count],
        ["drift_detected", 1],
        json.message ?? "",
      );
      assertMatch(json.message ?? "", /rewrote the history|shortened/);
    });
  }
});

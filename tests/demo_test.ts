/** `install.sh --demo`, run for real from a copy of this checkout in a folder with a space. */
import { assert, assertEquals, assertMatch, assertStringIncludes } from "@std/assert";
import { copySync, existsSync } from "@std/fs";
import { fromFileUrl, join } from "@std/path";

const ROOT = fromFileUrl(new URL("../", import.meta.url));
const TASK = ".automaton/tasks/complete/greet-nobody";
const LOOP = ".automaton/loops/demo";

/** What the checkout must hold for a demo; vendor and .deno are made by it. */
const CHECKOUT = [
  "install.sh",
  "lib",
  "scripts",
  "prompts",
  "templates",
  "deno.json",
  "config.md",
  "vendor",
];

interface Place {
  base: string;
  framework: string;
  env: Record<string, string>;
}

interface Result {
  code: number;
  stdout: string;
  stderr: string;
}

/**
 * A copy of the checkout, with a home, a git configuration and an environment that would break the
 * demo if it looked at them.
 */
function makePlace(): Place {
  const base = Deno.realPathSync(Deno.makeTempDirSync({ prefix: "automaton demo " }));
  const framework = join(base, "check out");
  Deno.mkdirSync(framework);
  for (const name of CHECKOUT) {
    if (existsSync(join(ROOT, name))) copySync(join(ROOT, name), join(framework, name));
  }
  for (const name of ["home", "tmp"]) Deno.mkdirSync(join(base, name));
  Deno.writeTextFileSync(
    join(base, "home", ".gitconfig"),
    "[init]\ndefaultBranch = trunk\n[commit]\ngpgsign = true\n[core]\nhooksPath = /nowhere\n" +
      "[user]\nname = Somebody\nemail = somebody@invalid\n",
  );
  return {
    base,
    framework,
    env: {
      PATH: Deno.env.get("PATH") ?? "",
      AUTOMATON_DENO: Deno.execPath(),
      HOME: join(base, "home"),
      TMPDIR: join(base, "tmp"),
      AUTOMATON_ROLE: "verify",
      AUTOMATON_PROJECT: "/nowhere",
      AUTOMATON_CONTEXT_TOKENS: "1",
      GIT_DIR: "/nowhere",
      GIT_AUTHOR_NAME: "Somebody",
    },
  };
}

async function withPlace(run: (place: Place) => Promise<void>): Promise<void> {
  const place = makePlace();
  try {
    await run(place);
  } finally {
    Deno.removeSync(place.base, { recursive: true });
  }
}

async function install(place: Place, args: string[], env = {}): Promise<Result> {
  const { code, stdout, stderr } = await new Deno.Command("./install.sh", {
    args,
    cwd: place.framework,
    clearEnv: true,
    env: { ...place.env, ...env },
    stdin: "null",
  }).output();
  const text = (bytes: Uint8Array) => new TextDecoder().decode(bytes);
  return { code, stdout: text(stdout), stderr: text(stderr) };
}

function git(dir: string, ...args: string[]): string {
  const { stdout } = new Deno.Command("git", {
    args: ["-C", dir, ...args],
    env: { GIT_CONFIG_GLOBAL: "/dev/null", GIT_CONFIG_NOSYSTEM: "1" },
  }).outputSync();
  return new TextDecoder().decode(stdout).trim();
}

/** Paths below `dir` with the content of each file, without the names in `skip`. */
function snapshot(dir: string, skip: string[] = []): Map<string, string> {
  const found = new Map<string, string>();
  for (const entry of Deno.readDirSync(dir)) {
    if (skip.includes(entry.name)) continue;
    const path = join(dir, entry.name);
    if (entry.isDirectory) { for (const [key, it] of snapshot(path)) found.set(key, it); }
    else found.set(path, Deno.readTextFileSync(path));
    found.set(path, found.get(path) ?? "folder");
  }
  return found;
}

function readJson(path: string): Record<string, unknown> {
  return JSON.parse(Deno.readTextFileSync(path));
}

/** The edge of a project that the demo has left behind, as data. */
function readOutput(project: string, name: string): string {
  return Deno.readTextFileSync(join(project, LOOP, "outputs", name));
}

Deno.test("install.sh --demo shows a loop from its first tick to its last", async (t) => {
  await withPlace(async (place) => {
    const project = join(place.base, "a new project");
    const isMade = ["vendor", ".deno"];
    const before = snapshot(place.framework, isMade);
    const homeBefore = snapshot(place.env.HOME!);
    const { code, stdout, stderr } = await install(place, ["--demo", project]);
    const state = () => readJson(join(project, LOOP, ".state.loop"));

    await t.step("it exits 0 and names the project in its last line", () => {
      assertEquals(code, 0, `${stdout}\n${stderr}`);
      assertEquals(stdout.trimEnd().split("\n").at(-1), `demo project: ${project}`);
    });

    await t.step("it tells the story in order", () => {
      const story = [
        "parameter not set",
        "$ status --create-task greet-nobody",
        "$ status --create-loop demo --from-template demo",
        "research: pass, score 1, next design",
        "design: pass, score 1, next spec",
        "spec: pass, score 1, next human_intervention",
        "$ status --approve --task greet-nobody",
        "implement: FAIL, score 0.4",
        "hint for the next try: Without an argument, fall back to the name world",
        "implement: pass, score 1, next code_review",
        "nothing done (halted): the loop is halted, iterations_exhausted",
        "$ status --approve --loop demo",
        "code_review: pass, score 1, next bug_hunt",
        "bug_hunt: pass, score 1, next complete",
        "Hello, world!",
        "$ status --loop-list",
      ];
      let from = 0;
      for (const part of story) {
        const at = stdout.indexOf(part, from);
        assert(at >= 0, `"${part}" is missing after:\n${stdout.slice(0, from)}`);
        from = at + part.length;
      }
    });

    await t.step("the task went through every phase, approved by a person", () => {
      const task = readJson(join(project, TASK, ".state"));
      assertEquals(task.phase, "complete");
      assertEquals(typeof task.approved_at, "string");
      const steps = (task.history as { from: string | null; to: string }[])
        .filter(({ from, to }) => from !== null && from !== to)
        .map(({ to }) => to);
      assertEquals(steps, [
        "design",
        "spec",
        "human_intervention",
        "implement",
        "code_review",
        "bug_hunt",
        "complete",
      ]);
      for (
        const name of [
          "RESEARCH",
          "DESIGN",
          "SPEC",
          "IMPLEMENTATION",
          "CODE_REVIEW",
          "BUG_REPORT",
        ]
      ) {
        assertMatch(Deno.readTextFileSync(join(project, TASK, `${name}.md`)), /^# /);
      }
      assert(!existsSync(join(project, ".automaton/tasks/greet-nobody")));
    });

    await t.step("the loop is complete after seven iterations and one approval", () => {
      const { status, halt_reason, iteration_count, resumed_count, iteration_base, current_task } =
        state();
      assertEquals(
        { status, halt_reason, iteration_count, resumed_count, iteration_base, current_task },
        {
          status: "complete",
          halt_reason: null,
          iteration_count: 7,
          resumed_count: 1,
          iteration_base: 5,
          current_task: null,
        },
      );
    });

    await t.step("the log holds seven ticks, the halt and the approval", () => {
      const events = Deno.readTextFileSync(join(project, LOOP, ".state.log")).trim().split("\n")
        .map((line) => JSON.parse(line).event);
      const count = (name: string) => events.filter((event) => event === name).length;
      assertEquals([count("TICK"), count("HALTED"), count("APPROVED")], [7, 1, 1]);
      assert(events.indexOf("HALTED") < events.indexOf("APPROVED"));
    });

    await t.step("the second try saw the hint of the first one's review", () => {
      const hint = "fall back to the name world";
      assert(!readOutput(project, "tick4-implement-prompt.md").includes(hint));
      assertStringIncludes(readOutput(project, "tick4-verdict.json"), hint);
      assertStringIncludes(readOutput(project, "tick5-implement-prompt.md"), hint);
    });

    await t.step("every review carries a nonce of its own", () => {
      const nonces = [1, 2, 3, 4, 5, 6, 7].map((tick) => {
        const nonce = /^"nonce": "(.+)"$/m.exec(readOutput(project, `tick${tick}-verify-prompt.md`))
          ?.[1] ?? "";
        assertStringIncludes(readOutput(project, `tick${tick}-verify.log`), `"nonce":"${nonce}"`);
        return nonce;
      });
      assert(nonces.every((nonce) => nonce.length >= 16), nonces.join());
      assertEquals(new Set(nonces).size, 7);
    });

    await t.step(
      "the third session of a tick moved the task on by the command it was given",
      () => {
        assertMatch(
          readOutput(project, "tick1-orchestrate-prompt.md"),
          /^ {4}.*--transition PHASE/m,
        );
        assertStringIncludes(readOutput(project, "tick4-orchestrate.log"), "no command");
      },
    );

    await t.step("the repair is on the loop's branch, and the checkout is untouched", () => {
      const worktree = join(project, LOOP, "worktree");
      assertEquals(git(worktree, "symbolic-ref", "HEAD"), "refs/heads/loop/demo");
      assertEquals(git(project, "symbolic-ref", "HEAD"), "refs/heads/main");
      assertEquals(git(project, "status", "--porcelain"), "");
      assertEquals(
        git(project, "log", "--format=%an <%ae> %s", "main"),
        [
          "Automaton demo <demo@invalid> Greet by name",
        ].join(),
      );
      assertStringIncludes(Deno.readTextFileSync(join(worktree, "greet.sh")), "${1:-world}");
    });

    await t.step("nothing else was touched", () => {
      assertEquals(snapshot(place.framework, isMade), before);
      assertEquals(snapshot(place.env.HOME!), homeBefore);
      assertEquals([...Deno.readDirSync(place.env.TMPDIR!)], []);
      assertEquals([...Deno.readDirSync(place.base)].map(({ name }) => name).sort(), [
        "a new project",
        "check out",
        "home",
        "tmp",
      ]);
    });
  });
});

Deno.test("install.sh --demo fails when the loop does not go as scripted", async () => {
  await withPlace(async (place) => {
    // Without the hint in its prompt the agent makes the same mistake again.
    const prompt = join(place.framework, "prompts/loop-implement.md");
    Deno.writeTextFileSync(prompt, Deno.readTextFileSync(prompt).replace("{next_hint}", ""));
    const { code, stdout, stderr } = await install(place, ["--demo"]);
    assertEquals(code, 1, `${stdout}\n${stderr}`);
    assertStringIncludes(stderr, 'as scripted: tick 5 should hold "pass":true but is\n{');
    const last = stdout.trimEnd().split("\n").at(-1) ?? "";
    assertMatch(last, /^demo project: .*\/tmp\/automaton-demo\.[A-Za-z0-9]+$/);
    assert(last.startsWith(`demo project: ${place.env.TMPDIR}/`), last);
    assert(existsSync(join(last.replace("demo project: ", ""), LOOP)));
  });
});

Deno.test("install.sh --demo refuses a folder that is not empty and leaves it alone", async () => {
  await withPlace(async (place) => {
    const project = join(place.base, "mine");
    Deno.mkdirSync(project);
    Deno.writeTextFileSync(join(project, ".hidden"), "mine");
    const before = snapshot(project);
    for (const args of [["--demo", project], [`--demo=${project}`]]) {
      const { code, stdout, stderr } = await install(place, args);
      assertEquals([code, stdout], [1, ""]);
      assertStringIncludes(stderr, `Cannot use folder "${project}": it is not empty\nhint: `);
    }
    assertEquals(snapshot(project), before);
  });
});

Deno.test("install.sh --demo refuses a file in the place of its folder", async () => {
  await withPlace(async (place) => {
    const file = join(place.base, "file");
    Deno.writeTextFileSync(file, "mine");
    const { code, stdout, stderr } = await install(place, ["--demo", file]);
    assertEquals([code, stdout], [1, ""]);
    assertStringIncludes(stderr, `Cannot make folder "${file}"`);
    assertEquals(Deno.readTextFileSync(file), "mine");
  });
});

Deno.test("install.sh --demo says so when git is missing", async () => {
  await withPlace(async (place) => {
    const bin = join(place.base, "bin");
    Deno.mkdirSync(bin);
    for (const name of ["sh", "dirname"]) {
      const { stdout } = new Deno.Command("sh", { args: ["-c", `command -v ${name}`] })
        .outputSync();
      Deno.symlinkSync(new TextDecoder().decode(stdout).trim(), join(bin, name));
    }
    const { code, stdout, stderr } = await install(place, ["--demo"], { PATH: bin });
    assertEquals([code, stdout], [1, ""]);
    assertEquals(stderr, "Cannot run the demo: git was not found on PATH\n");
    assertEquals([...Deno.readDirSync(place.env.TMPDIR!)], []);
  });
});

Deno.test("install.sh refuses calls that it does not know", async () => {
  await withPlace(async (place) => {
    const cases: [string[], string][] = [
      [["--dem"], 'Cannot use option "--dem": there is no such option'],
      [["--demo", "--uninstall"], 'Cannot use option "--demo" with "--uninstall"'],
      [["--demo", "--no-loop"], 'Cannot use option "--no-loop" with "--demo"'],
      [["--demo", ""], 'Cannot use option "--demo": its folder is empty'],
      [["--demo", "a", "b"], 'Cannot use option "b"'],
    ];
    for (const [args, message] of cases) {
      const { code, stdout, stderr } = await install(place, args);
      assertEquals([code, stdout], [2, ""]);
      assertStringIncludes(stderr, message);
      assertStringIncludes(stderr, "hint: ./install.sh --help");
    }
    assert(!existsSync(join(place.framework, "a")));
  });
});

Deno.test("install.sh --help names its options", async () => {
  await withPlace(async (place) => {
    const { code, stdout } = await install(place, ["--help"]);
    assertEquals(code, 0);
    assertStringIncludes(stdout, "--demo [DIR]");
  });
});

/**
 * A loop's worktree as a state machine: whatever state people, agents and crashes have brought it or the
 * repository into, a tick works on the loop's branch, or says in a line what is in its way and does nothing.
 * No commit of the branch and no file that was not committed is ever lost, and the person's checkout stays.
 */
import { copySync, existsSync } from "@std/fs";
import { join } from "@std/path";
import {
  git,
  makeRepository,
  makeScratch,
  poll,
  runProgram,
  type Scratch,
  snapshot,
  writeFile,
  writeScript,
} from "../helpers.ts";
import {
  LOOP,
  makeLoop,
  outputOf,
  readJournal,
  readState,
  startTick,
  tick,
  type TickResult,
  worktreeOf,
} from "../runner_support.ts";
import {
  awaitNoneLiving,
  chooseCases,
  describeCheckout,
  IS_FULL,
  killNow,
  listHeldLocks,
  listLiving,
  listSetBacks,
  Random,
  readMemory,
  runAll,
  Tally,
} from "./support.ts";

const BRANCH = `loop/${LOOP}`;
const WALKS = IS_FULL ? 24 : 1;
const STEPS_OF_WALK = IS_FULL ? 8 : 4;

/** Where a trial takes place. */
interface Place {
  readonly scratch: Scratch;
  /** The loop's worktree, which may not be there. */
  readonly worktree: string;
  /** Runs git in the person's checkout. */
  readonly inProject: (...args: string[]) => string;
  /** Runs git in the worktree. */
  readonly inWorktree: (...args: string[]) => string;
  /** Runs a script of sh in the worktree. */
  readonly sh: (script: string) => void;
}

/** One state, and how to get out of it where a tick cannot. */
interface State {
  readonly enter: (place: Place) => void | Promise<void>;
  /** What the session does, where it is not only work. */
  readonly during?: string;
  /** What a tick says instead of working; absent where it has to work. */
  readonly told?: RegExp;
  /** What a person does then. */
  readonly leave?: (place: Place) => void;
  /** Looks at what the tick did; returns what is wrong. */
  readonly look?: (place: Place, result: TickResult) => string | null;
}

function placeOf(scratch: Scratch): Place {
  const worktree = worktreeOf(scratch);
  return {
    scratch,
    worktree,
    inProject: (...args) => git(scratch, scratch.project, ...args),
    inWorktree: (...args) => git(scratch, worktree, ...args),
    sh: (script) => {
      const { success, stderr } = new Deno.Command("sh", {
        args: ["-euc", script],
        cwd: worktree,
        clearEnv: true,
        env: {
          ...scratch.env,
          project: scratch.project,
          elsewhere: join(scratch.dir, "elsewhere"),
        },
      }).outputSync();
      if (!success) throw new Error(`${script}: ${new TextDecoder().decode(stderr)}`);
    },
  };
}

/** A file that nobody has committed. */
const leavePrecious = ({ worktree }: Place) => writeFile(join(worktree, "precious.txt"), "mine\n");
const elsewhereOf = ({ scratch }: Place) => join(scratch.dir, "elsewhere");
const shows = (text: string) => (place: Place): string | null => {
  const prompt = Deno.readTextFileSync(lastPrompt(place));
  return prompt.includes(text) ? null : `the verifier was not shown ${JSON.stringify(text)}`;
};
const hides = (text: string) => (place: Place): string | null =>
  shows(text)(place) === null ? `the verifier was shown ${JSON.stringify(text)}` : null;
const warns = (pattern: RegExp) => (_place: Place, { json }: TickResult): string | null =>
  pattern.test(json.warnings.join("\n")) ? null : `no warning like ${pattern}: ${json.warnings}`;
const lastPrompt = ({ scratch }: Place): string =>
  outputOf(scratch, `tick${readState(scratch).iteration_count}-verify-prompt.md`);

/** What the worktree and the repository may be in once the loop has worked there. */
const LATER: Readonly<Record<string, State>> = {
  "missing": { enter: ({ worktree }) => Deno.removeSync(worktree, { recursive: true }) },
  "missing, with its registration": {
    enter: ({ worktree, inProject }) => {
      Deno.removeSync(worktree, { recursive: true });
      inProject("worktree", "prune");
    },
  },
  "moved by hand": {
    enter: (place) => {
      leavePrecious(place);
      Deno.renameSync(place.worktree, elsewhereOf(place));
    },
    leave: (place) => removeTree(elsewhereOf(place)),
  },
  "moved by git": {
    enter: (place) => {
      leavePrecious(place);
      place.inProject("worktree", "move", place.worktree, elsewhereOf(place));
    },
    told: /already (checked out|used by worktree) at '.*elsewhere'/,
    leave: (place) => {
      place.inProject("worktree", "move", elsewhereOf(place), place.worktree);
    },
  },
  "locked": {
    enter: ({ inProject, worktree }) => void inProject("worktree", "lock", worktree),
    leave: ({ inProject, worktree }) => void inProject("worktree", "unlock", worktree),
  },
  "locked and missing": {
    enter: ({ inProject, worktree }) => {
      inProject("worktree", "lock", "--reason", "on a stick", worktree);
      Deno.removeSync(worktree, { recursive: true });
    },
    told: /locked \(on a stick\); git worktree unlock/,
    leave: ({ inProject, worktree }) => void inProject("worktree", "unlock", worktree),
  },
  "unregistered": {
    enter: (place) => {
      leavePrecious(place);
      removeTree(join(commonDir(place), "worktrees"));
    },
    look: warns(/was no worktree of this repository/),
  },
  "a folder that git does not know": {
    enter: ({ worktree, inProject }) => {
      inProject("worktree", "remove", "--force", worktree);
      writeFile(join(worktree, "precious.txt"), "mine\n");
    },
    look: warns(/was no worktree of this repository/),
  },
  "without its .git file": {
    enter: (place) => {
      leavePrecious(place);
      Deno.removeSync(join(place.worktree, ".git"));
    },
    look: warns(/was no worktree of this repository/),
  },
  "with the .git file of the person's checkout": {
    enter: (place) => {
      leavePrecious(place);
      Deno.writeTextFileSync(
        join(place.worktree, ".git"),
        `gitdir: ${place.inProject("rev-parse", "--absolute-git-dir")}\n`,
      );
    },
    look: warns(/was no worktree of this repository/),
  },
  "a link to a copy of it": {
    enter: (place) => {
      leavePrecious(place);
      Deno.renameSync(place.worktree, elsewhereOf(place));
      Deno.symlinkSync(elsewhereOf(place), place.worktree);
    },
    leave: (place) => removeTree(elsewhereOf(place)),
  },
  "dirty": {
    enter: (place) => {
      leavePrecious(place);
      place.sh(
        "echo more >>README.md; echo staged >staged; git add staged; git rm -q --cached work.txt",
      );
    },
    look: shows("+staged"),
  },
  "in the middle of a merge": {
    enter: ({ sh }) =>
      sh(`git checkout -q -b theirs; echo theirs >>work.txt; git commit -qam theirs
          git checkout -q ${BRANCH}; echo ours >>work.txt; git commit -qam ours
          git merge -q theirs >/dev/null && exit 1; git branch -q -D theirs`),
    leave: ({ sh }) => sh("git merge --abort 2>/dev/null || git reset -q --merge"),
  },
  "in the middle of a rebase": {
    enter: ({ sh }) =>
      sh(`git checkout -q -b theirs; echo theirs >>work.txt; git commit -qam theirs
          git checkout -q ${BRANCH}; echo ours >>work.txt; git commit -qam ours
          git rebase -q theirs >/dev/null 2>&1 && exit 1; git branch -q -D theirs`),
    look: warns(new RegExp(`on no branch, not on ${BRANCH}`)),
    leave: ({ sh }) => sh("git rebase --abort"),
  },
  "on another branch": {
    enter: ({ inWorktree }) => void inWorktree("checkout", "-q", "-B", "another"),
    look: warns(new RegExp(`is on another, not on ${BRANCH}`)),
    leave: ({ sh }) => sh(`git checkout -q ${BRANCH}; git branch -q -D another`),
  },
  "its branch checked out elsewhere": {
    enter: (place) => {
      place.inProject("worktree", "remove", "--force", place.worktree);
      place.inProject("worktree", "add", "-q", elsewhereOf(place), BRANCH);
    },
    told: /already (checked out|used by worktree) at '.*elsewhere'/,
    leave: (place) => {
      place.inProject("worktree", "remove", "--force", elsewhereOf(place));
    },
  },
  "with an index lock that a git left which was killed": {
    enter: ({ worktree, inWorktree }) => {
      const path = inWorktree("rev-parse", "--path-format=absolute", "--git-path", "index.lock");
      if (!existsSync(worktree)) return;
      Deno.writeTextFileSync(path, "");
      const hourAgo = new Date(Date.now() - 3_600_000);
      Deno.utimeSync(path, hourAgo, hourAgo);
    },
    look: warns(/removed ".*index\.lock"/),
  },
  "with an index lock of a git at work": {
    enter: ({ inWorktree }) => {
      Deno.writeTextFileSync(
        inWorktree("rev-parse", "--path-format=absolute", "--git-path", "index.lock"),
        "",
      );
    },
    look: warns(/nothing is committed: .*index\.lock/),
    leave: ({ inWorktree }) => {
      Deno.removeSync(
        inWorktree("rev-parse", "--path-format=absolute", "--git-path", "index.lock"),
      );
    },
  },
  "with a torn index": {
    enter: ({ inWorktree }) => {
      Deno.writeTextFileSync(
        inWorktree("rev-parse", "--path-format=absolute", "--git-path", "index"),
        "torn",
      );
    },
    told: /cannot read the branch or the index of .*index file/,
    leave: ({ sh }) => sh('rm "$(git rev-parse --git-path index)"; git reset -q'),
  },
  "its branch deleted under it": {
    enter: ({ inProject }) => void inProject("update-ref", "-d", `refs/heads/${BRANCH}`),
    told: /cannot read the branch or the index of .*HEAD/,
    leave: ({ sh }) => sh(`git update-ref refs/heads/${BRANCH} "$(cat "$project/../tip")"`),
  },
  ...Object.fromEntries(
    ["git checkout -q -f main", "git symbolic-ref HEAD refs/heads/main"].map((command) => [
      `left by its agent with ${command.replace(" -q -f", "")}`,
      {
        enter: ({ inProject }: Place) => void inProject("checkout", "-q", "-B", "person"),
        during: `${command}; echo worked >>work.txt`,
        look: warns(/nothing is committed: the worktree is on main/),
        leave: ({ inProject, sh }: Place) => {
          sh(`git symbolic-ref HEAD refs/heads/${BRANCH}; git reset -q --hard`);
          inProject("checkout", "-q", "main");
        },
      },
    ]),
  ),
  "missing, while a worktree of the person is on a disk that is not mounted": {
    enter: (place) => {
      const stick = join(place.scratch.dir, "stick");
      place.inProject("worktree", "add", "-q", "-b", "stick", stick);
      Deno.renameSync(stick, `${stick}.away`);
      Deno.removeSync(place.worktree, { recursive: true });
    },
    look: ({ inProject }) =>
      inProject("worktree", "list").includes("[stick]") ? null : "git has forgotten the worktree",
    leave: ({ scratch, inProject }) => {
      const stick = join(scratch.dir, "stick");
      Deno.renameSync(`${stick}.away`, stick);
      inProject("worktree", "remove", "--force", stick);
      inProject("branch", "-q", "-D", "stick");
    },
  },
  "another branch checked out by the person": {
    enter: ({ inProject }) => void inProject("checkout", "-q", "-B", "person"),
    leave: ({ inProject }) => void inProject("checkout", "-q", "main"),
  },
  "the person on no branch": {
    enter: ({ inProject }) => void inProject("checkout", "-q", "--detach"),
    leave: ({ inProject }) => void inProject("checkout", "-q", "main"),
  },
  "a hook that fails": {
    enter: (place) => setHook(place, "pre-commit", "echo refused >&2; exit 1"),
    look: warns(/nothing is committed: .*refused/),
    leave: (place) => Deno.removeSync(hookOf(place, "pre-commit")),
  },
  "a hook that hangs": {
    enter: (place) => setHook(place, "pre-commit", "sleep 1000"),
    look: warns(/nothing is committed: .*longer than/),
    leave: (place) => Deno.removeSync(hookOf(place, "pre-commit")),
  },
  "missing, and a hook of the checkout fails": {
    enter: (place) => {
      Deno.removeSync(place.worktree, { recursive: true });
      setHook(place, "post-checkout", "echo refused >&2; exit 1");
    },
    look: warns(/git worktree add.*refused/),
    leave: (place) => Deno.removeSync(hookOf(place, "post-checkout")),
  },
  "missing, and a hook of the checkout hangs": {
    enter: (place) => {
      Deno.removeSync(place.worktree, { recursive: true });
      setHook(place, "post-checkout", "sleep 1000 & sleep 1000");
    },
    look: warns(/git worktree add: worktree ran longer than/),
    leave: (place) => Deno.removeSync(hookOf(place, "post-checkout")),
  },
  "missing, and its making was killed": { enter: killWhileAdding },
  "the project moved, and all in it": {
    enter: (place) => {
      leavePrecious(place);
      // What a move leaves: paths that were true before it.
      const { project } = place.scratch;
      const admin = join(commonDir(place), "worktrees", "worktree");
      for (
        const path of [
          join(admin, "gitdir"),
          join(place.worktree, ".git"),
          join(place.worktree, "../.state.loop"),
        ]
      ) {
        const text = Deno.readTextFileSync(path);
        Deno.writeTextFileSync(path, text.replaceAll(project, `${project}-before`));
      }
    },
    look: ({ worktree }) =>
      existsSync(join(worktree, "precious.txt")) ? null : "what was not committed is elsewhere",
  },
  "commits that would ask for a passphrase": {
    enter: (place) => {
      writeScript(
        join(place.scratch.bin, "ask"),
        "#!/bin/sh\nread -r word </dev/tty || sleep 1000\n",
      );
      place.inProject("config", "commit.gpgsign", "true");
      place.inProject("config", "gpg.program", join(place.scratch.bin, "ask"));
    },
    look: committed,
    leave: ({ inProject }) => {
      inProject("config", "--unset", "commit.gpgsign");
      inProject("config", "--unset", "gpg.program");
    },
  },
  "a file whose name has a newline": {
    enter: ({ worktree }) => writeFile(join(worktree, "a\nb\t\u00e9"), "x\n"),
    look: committed,
  },
  "a rename that changes letter case only": {
    enter: ({ worktree }) => {
      const [from, to] = existsSync(join(worktree, "README.md"))
        ? ["README.md", "readme.md"]
        : ["readme.md", "README.md"];
      Deno.renameSync(join(worktree, from), join(worktree, to));
    },
    look: committed,
  },
  "a link that leads out of it": {
    enter: ({ worktree, scratch }) => {
      if (!existsSync(join(worktree, "out"))) Deno.symlinkSync(scratch.home, join(worktree, "out"));
    },
    look: committed,
  },
};

/** What a project may be before its loop has ever worked. */
const FIRST: Readonly<Record<string, State>> = {
  "a default branch of any name": {
    enter: ({ inProject }) => void inProject("branch", "-m", "tr\u00fcnk/100%"),
  },
  "no branch checked out": {
    enter: ({ inProject }) => void inProject("checkout", "-q", "--detach"),
  },
  "nothing that keeps .automaton out of git": {
    enter: ({ scratch, inProject }) => {
      writeFile(join(scratch.project, ".gitignore"), "*.log\n");
      inProject("commit", "-qm", "ignore less", "--", ".gitignore");
    },
    look: ({ inProject }) => {
      const seen = inProject("status", "--porcelain", "--untracked-files=all");
      return seen.includes("/worktree") ? `the person is shown the worktree: ${seen}` : null;
    },
  },
  "no commit yet": {
    enter: ({ scratch, inProject }) => {
      removeTree(join(scratch.project, ".git"));
      inProject("init", "-q");
    },
    told: /no commit yet/,
    leave: ({ inProject }) => {
      inProject("add", "README.md", ".gitignore");
      inProject("commit", "-qm", "start");
    },
  },
  "the loop's branch is there already": {
    enter: ({ inProject }) => void inProject("branch", BRANCH),
  },
  "the loop's branch is checked out by the person": {
    enter: ({ inProject }) => void inProject("checkout", "-q", "-b", BRANCH),
    told: /already (checked out|used by worktree)/,
    leave: ({ inProject }) => void inProject("checkout", "-q", "main"),
  },
  "a branch is in the way of its name": {
    enter: ({ inProject }) => void inProject("branch", "loop"),
    told: /loop/,
    leave: ({ inProject }) => void inProject("branch", "-D", "loop"),
  },
  "a worktree of another checkout": { enter: (place) => moveProjectInto(place, "worktree") },
  "a worktree of a bare repository": { enter: (place) => moveProjectInto(place, "bare worktree") },
  "a submodule": { enter: (place) => moveProjectInto(place, "submodule") },
  "a bare repository": {
    enter: ({ scratch, inProject }) => {
      inProject("config", "core.bare", "true");
      for (const name of ["README.md", ".gitignore"]) Deno.removeSync(join(scratch.project, name));
    },
    told: /bare repository/,
    leave: ({ inProject }) => {
      inProject("config", "core.bare", "false");
      inProject("reset", "-q", "--hard");
    },
  },
  "with a submodule": {
    enter: (place) => {
      addSubmodule(place);
    },
    look: ({ worktree }) => existsSync(join(worktree, "lib/lib.txt")) ? null : "lib is empty",
  },
  "with a submodule that cannot be had": {
    enter: (place) => {
      const library = addSubmodule(place);
      Deno.renameSync(library, `${library}.away`);
    },
    told: /submodule/,
    leave: (place) =>
      Deno.renameSync(join(place.scratch.dir, "library.away"), join(place.scratch.dir, "library")),
  },
  "with files in LFS, which is not installed": {
    enter: (place) => {
      useLfs(place);
      // The person, who has it, is not in the tick's place.
      place.inProject("config", "filter.lfs.clean", "cat");
    },
    told: /git-lfs/,
    leave: installLfs,
  },
  "with files in LFS": {
    enter: (place) => {
      useLfs(place);
      installLfs(place);
    },
    look: (place) =>
      Deno.readTextFileSync(join(place.worktree, "big.bin")) === "content of 1\n"
        ? hides("content of")(place)
        : "the file is not there",
  },
  "with LFS pointers and no filter": {
    enter: (place) => {
      useLfs(place);
      for (const name of ["smudge", "clean", "required"]) {
        place.inProject("config", "--unset", `filter.lfs.${name}`);
      }
    },
    look: ({ worktree }) =>
      Deno.readTextFileSync(join(worktree, "big.bin")).startsWith("version ") ? null : "no pointer",
  },
};

function removeTree(path: string): void {
  if (existsSync(path)) Deno.removeSync(path, { recursive: true });
}

const commonDir = ({ inProject }: Place): string =>
  inProject("rev-parse", "--path-format=absolute", "--git-common-dir");
const hookOf = (place: Place, name: string): string => join(commonDir(place), "hooks", name);

function setHook(place: Place, name: string, script: string): void {
  writeScript(hookOf(place, name), `#!/bin/sh\n${script}\n`);
}

/** What is wrong where the tick's work is not on the branch. */
function committed({ scratch, inWorktree }: Place): string | null {
  const { iteration_count } = readState(scratch);
  const last = inWorktree("log", "-1", "--format=%s");
  const left = inWorktree("status", "--porcelain");
  if (!last.includes(`tick ${iteration_count},`)) {
    return `tick ${iteration_count} is not in ${last}`;
  }
  return left === "" ? null : `not committed: ${left}`;
}

/** Kills a tick while its git fills the worktree: files are missing, and nothing says that they are. */
async function killWhileAdding(place: Place): Promise<void> {
  const { scratch, worktree, inProject } = place;
  Deno.removeSync(worktree, { recursive: true });
  const flag = join(scratch.dir, "filling");
  inProject("config", "filter.slow.smudge", `touch '${flag}'; sleep 600`);
  writeFile(
    join(commonDir(place), "info", "attributes"),
    "README.md filter=slow\nreadme.md filter=slow\n",
  );
  const child = startTick(scratch);
  await poll("checkout", () => existsSync(flag));
  child.kill("SIGKILL");
  await child.output();
  // git goes on without the tick that started it, and would finish once its filter has ended.
  await poll("end of git", () => {
    const left = listLiving(scratch);
    for (const { pid } of left) killNow(pid);
    return left.length === 0;
  });
  inProject("config", "--remove-section", "filter.slow");
  Deno.removeSync(join(commonDir(place), "info", "attributes"));
  Deno.removeSync(flag);
}

/** Makes the project a part of another repository, with its `.automaton` as it was. */
function moveProjectInto({ scratch, inProject }: Place, kind: string): void {
  const { project, dir } = scratch;
  const [aside, outer] = [join(dir, "aside"), join(dir, "outer")];
  Deno.renameSync(project, aside);
  if (kind === "submodule") {
    makeRepository(scratch, outer);
    git(scratch, outer, "submodule", "--quiet", "add", aside, "inner");
    git(scratch, outer, "commit", "-qm", "submodule");
    Deno.symlinkSync(join(outer, "inner"), project);
  } else {
    if (kind === "worktree") git(scratch, dir, "clone", "-q", aside, outer);
    else git(scratch, dir, "clone", "-q", "--bare", aside, outer);
    git(scratch, outer, "worktree", "add", "-q", "-b", "person", project);
  }
  Deno.renameSync(join(aside, ".automaton"), join(project, ".automaton"));
  inProject("status");
}

/** Gives the project a submodule `lib`; returns the repository that it comes from. */
function addSubmodule({ scratch, inProject }: Place): string {
  const library = join(scratch.dir, "library");
  makeRepository(scratch, library, { "lib.txt": "library\n" });
  inProject("submodule", "--quiet", "add", library, "lib");
  inProject("commit", "-qm", "submodule");
  return library;
}

const POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 13\n";

/** Puts a pointer of git-lfs into the repository, with the settings that `git lfs install` makes. */
function useLfs({ scratch, inProject }: Place): void {
  writeFile(join(scratch.project, "big.bin"), POINTER);
  inProject("add", "big.bin");
  writeFile(join(scratch.project, ".gitattributes"), "*.bin filter=lfs diff=lfs merge=lfs -text\n");
  inProject("add", ".gitattributes");
  inProject("commit", "-qm", "a big file");
  inProject("config", "filter.lfs.smudge", "git-lfs smudge -- %f");
  inProject("config", "filter.lfs.clean", "git-lfs clean -- %f");
  inProject("config", "filter.lfs.required", "true");
}

/** Stands in for git-lfs: a pointer becomes a content, and a content its pointer. */
function installLfs({ scratch }: Place): void {
  writeScript(
    join(scratch.bin, "git-lfs"),
    `#!/bin/sh
number=$(cat | sed -n 's/^oid sha256:\\([0-9]*\\)$/\\1/p; s/^content of \\([0-9]*\\)$/\\1/p')
case $1 in
  smudge) echo "content of $number" ;;
  clean) printf 'version https://git-lfs.github.com/spec/v1\\noid sha256:%s\\nsize 13\\n' "$number" ;;
esac
`,
  );
}

function makePlace(): Place {
  const bare = makeScratch();
  const place = placeOf(bare);
  makeLoop(bare, {
    implement: 'eval "${DO_implement-echo worked >>work.txt}"',
    verify: "verdict false 0.5",
    config: {
      brakes: { max_iterations: 1000, score_plateau_window: 500, max_consecutive_failures: 1000 },
      blast_radius: { commit: "always" },
      harness: { timeout_seconds: 4 },
    },
  });
  writeFile(join(bare.project, "README.md"), "a project\nthat its person changes\n");
  writeFile(join(bare.project, "untracked.txt"), "the person's\n");
  return place;
}

/** The first tick, which makes the worktree and leaves the person's checkout as it is. */
async function makeWorktree({ scratch }: Place, tally: Tally): Promise<void> {
  const checkout = describeCheckout(scratch);
  const { json } = await tick(scratch);
  const isWorked = json.reason === null && json.verdict !== null;
  tally.check(isWorked, "other", `no first tick: ${json.reason}: ${json.message}`);
  const isKept = describeCheckout(scratch) === checkout;
  tally.check(
    isKept,
    "other",
    () => `the first tick made of ${checkout}: ${describeCheckout(scratch)}`,
  );
}

/** The branches that are no loop's. */
const listOtherBranches = ({ inProject }: Place): string =>
  inProject("for-each-ref", "--format=%(refname) %(objectname)", "refs/heads").split("\n")
    .filter((line) => !line.startsWith("refs/heads/loop/")).join("\n");

const branchTip = ({ inProject }: Place): string =>
  inProject("for-each-ref", "--format=%(objectname)", `refs/heads/${BRANCH}`);

/** Lets one tick meet one state, and the next one what a person made of it. */
async function meet(place: Place, name: string, state: State, tally: Tally): Promise<void> {
  const { scratch } = place;
  const lose = (loss: Parameters<Tally["lose"]>[0], what: string) =>
    tally.lose(loss, `${name}: ${what}`);
  tally.tried++;
  const tip = branchTip(place);
  writeFile(join(scratch.dir, "tip"), tip);
  await state.enter(place);
  const isPrecious = countPrecious(scratch) > 0;
  const [before, checkout] = [readMemory(scratch), describeCheckout(scratch)];
  const [roles, branches] = [readJournal(scratch).length, listOtherBranches(place)];

  const env = state.during === undefined ? {} : { DO_implement: state.during };
  const result = await tick(scratch, [], { env });
  checkEnd(result, lose);
  if (state.told === undefined) {
    checkWork(place, result, lose);
    const problem = state.look?.(place, result) ?? null;
    if (problem !== null) lose("other", problem);
  } else {
    const { reason, message, ok } = result.json;
    const isTold = reason === "worktree_failed" && !ok && state.told.test(message ?? "");
    if (!isTold) lose("other", `not told: ${reason}: ${message}`);
    if (readJournal(scratch).length !== roles) lose("other", "a session was started");
  }
  if (describeCheckout(scratch) !== checkout) {
    lose("other", `the checkout changed:\n${checkout}\n---\n${describeCheckout(scratch)}`);
  }
  if (listOtherBranches(place) !== branches) {
    lose("other", `branches were moved:\n${branches}\n---\n${listOtherBranches(place)}`);
  }
  if (isPrecious && countPrecious(scratch) === 0 && !isPreciousCommitted(place)) {
    lose("states lost", "an uncommitted file is gone");
  }
  for (const problem of listSetBacks(before, readMemory(scratch))) lose("states lost", problem);

  state.leave?.(place);
  if (state.told !== undefined) checkWork(place, await tick(scratch), lose);
  if (tip !== "" && !isAncestor(place, tip)) lose("states lost", `${BRANCH} has lost ${tip}`);
  for (const lock of listHeldLocks(scratch)) lose("stuck locks", lock);
  for (const { pid, command } of await awaitNoneLiving(scratch)) {
    lose("processes left", command);
    killNow(pid);
  }
}

function checkEnd(
  { code, json, stderr }: TickResult,
  lose: (loss: Parameters<Tally["lose"]>[0], what: string) => void,
): void {
  if (code !== 0) lose("other", `exit code ${code}: ${stderr}`);
  for (const line of [json.message ?? "", ...json.warnings]) {
    // deno-lint-ignore no-control-regex -- they must not reach a terminal.
    if (/[\u0000-\u001f]/.test(line)) lose("other", `not one line: ${JSON.stringify(line)}`);
  }
}

/** The tick has worked in a worktree of its own, and its verifier saw what it did. */
function checkWork(
  place: Place,
  { json }: TickResult,
  lose: (loss: Parameters<Tally["lose"]>[0], what: string) => void,
): void {
  if (json.reason !== null || json.verdict === null) {
    return lose("other", `no tick: ${json.reason}: ${json.message}`);
  }
  const top = Deno.realPathSync(place.inWorktree("rev-parse", "--show-toplevel"));
  if (top !== Deno.realPathSync(place.worktree)) lose("other", `it worked in ${top}`);
  const names = [...Deno.readDirSync(place.worktree)].map(({ name }) => name.toLowerCase());
  const missing = ["readme.md", "work.txt"].filter((name) => !names.includes(name));
  if (missing.length > 0) lose("other", `the worktree lacks ${missing}`);
  const problem = shows("+worked")(place);
  if (problem !== null) lose("other", problem);
}

function isAncestor({ inProject }: Place, commit: string): boolean {
  try {
    inProject("merge-base", "--is-ancestor", commit, BRANCH);
    return true;
  } catch {
    return false;
  }
}

/** True once a tick has committed the file that was not committed. */
function isPreciousCommitted({ inProject }: Place): boolean {
  return inProject("ls-tree", "-r", "--name-only", BRANCH).split("\n").includes("precious.txt");
}

/** How many copies of the uncommitted file there are, wherever its folder was moved. */
function countPrecious(scratch: Scratch): number {
  const { stdout } = new Deno.Command("find", {
    args: [scratch.dir, "-name", "precious.txt", "-not", "-path", "*/.git/*"],
  }).outputSync();
  return new TextDecoder().decode(stdout).split("\n").length - 1;
}

/** Runs trials side by side; what a trial throws is its loss. */
async function tryAll(
  trials: readonly (readonly [name: string, trial: () => Promise<void>])[],
  tally: Tally,
): Promise<void> {
  const jobs = trials.map(([name, trial]) => async () => {
    try {
      await trial();
    } catch (error) {
      tally.lose("other", `${name}: ${error}`);
    }
  });
  await runAll(jobs, Math.max(2, navigator.hardwareConcurrency));
}

Deno.test({
  name: "a tick works in its worktree whatever state that is in, or says why not",
  ignore: Deno.build.os !== "linux",
  fn: async () => {
    const tally = new Tally("worktrees");
    const all = [...Object.entries(FIRST), ...Object.entries(LATER)];
    const chosen = chooseCases("worktree", all, 6);
    const trials = chosen.map(([name, state]) =>
      [name, async () => {
        const place = makePlace();
        using _ = place.scratch;
        if (name in LATER) await makeWorktree(place, tally);
        await meet(place, name, state, tally);
      }] as const
    );
    await tryAll(trials, tally);
    tally.close();
  },
});

Deno.test({
  name: "a worktree may go from any state to any other",
  ignore: Deno.build.os !== "linux",
  fn: async () => {
    const tally = new Tally("worktrees, one state after another");
    const trials = Array.from({ length: WALKS }, (_, number) =>
      [`walk ${number}`, async () => {
        const random = new Random(`walk ${number}`);
        const place = makePlace();
        using _ = place.scratch;
        await makeWorktree(place, tally);
        const path: string[] = [];
        for (let step = 0; step < STEPS_OF_WALK; step++) {
          const [name, state] = random.pick(Object.entries(LATER));
          path.push(name);
          try {
            await meet(place, path.join(" > "), state, tally);
          } catch (error) {
            tally.lose("other", `${path.join(" > ")}: ${error}`);
            break;
          }
        }
      }] as const);
    await tryAll(trials, tally);
    tally.close();
  },
});

/** What may become of the project's own repository once its loop has a worktree. */
const BROKEN: Readonly<Record<string, (project: string) => void>> = {
  "HEAD is empty": (project) => Deno.writeTextFileSync(join(project, ".git/HEAD"), ""),
  "HEAD is missing": (project) => Deno.removeSync(join(project, ".git/HEAD")),
  "its settings are torn": (project) =>
    Deno.writeTextFileSync(join(project, ".git/config"), "[core\n\tbare"),
  "it is gone": (project) => removeTree(join(project, ".git")),
  "an empty folder is in its place": (project) => {
    removeTree(join(project, ".git"));
    Deno.mkdirSync(join(project, ".git"));
  },
  "a file that leads nowhere is in its place": (project) => {
    removeTree(join(project, ".git"));
    Deno.writeTextFileSync(join(project, ".git"), "gitdir: /nowhere/at/all\n");
  },
  "a link that leads nowhere is in its place": (project) => {
    removeTree(join(project, ".git"));
    Deno.symlinkSync("/nowhere/at/all", join(project, ".git"));
  },
  "its objects are gone": (project) => removeTree(join(project, ".git/objects")),
};

Deno.test({
  name: "a repository that cannot be read sends no agent into the person's checkout",
  ignore: Deno.build.os !== "linux",
  fn: async () => {
    const tally = new Tally("broken repositories");
    const all = Object.entries(BROKEN);
    const chosen = chooseCases("broken", all, 2);
    const trials = chosen.map(([name, breakIt]) =>
      [name, async () => {
        const place = makePlace();
        const { scratch } = place;
        using _ = scratch;
        await makeWorktree(place, tally);
        const [own, aside] = [join(scratch.project, ".git"), join(scratch.dir, "kept.git")];
        copySync(own, aside);
        breakIt(scratch.project);
        const files = snapshot(scratch.project, [".git", ".automaton"]);
        const [roles, before] = [readJournal(scratch).length, readMemory(scratch)];
        tally.tried++;
        const result = await tick(scratch);
        const { reason, message, ok } = result.json;
        checkEnd(result, (loss, what) => tally.lose(loss, `${name}: ${what}`));
        const isRefused = !ok && ["worktree_failed", "gate_failed"].includes(`${reason}`) &&
          message;
        if (!isRefused) tally.lose("wrong passes", `${name}: ${reason}: ${message}`);
        if (readJournal(scratch).length !== roles) tally.lose("other", `${name}: a session ran`);
        const now = snapshot(scratch.project, [".git", ".automaton"]);
        if (JSON.stringify(now) !== JSON.stringify(files)) {
          tally.lose("other", `${name}: the checkout changed`);
        }
        new Deno.Command("rm", { args: ["-rf", own] }).outputSync();
        Deno.renameSync(aside, own);
        checkWork(place, await tick(scratch), (loss, what) => tally.lose(loss, `${name}: ${what}`));
        for (const problem of listSetBacks(before, readMemory(scratch))) {
          tally.lose("states lost", `${name}: ${problem}`);
        }
      }] as const
    );
    await tryAll(trials, tally);
    tally.close();
  },
});

/** Puts a git first in PATH that fails once, at its n-th call, as on a disk with a bad block. */
function failAt({ scratch }: Place, call: number): { countCalls(): number; end(): void } {
  const counter = join(scratch.dir, "calls");
  const real = new TextDecoder().decode(
    new Deno.Command("sh", { args: ["-c", "command -v git"], env: scratch.env, clearEnv: true })
      .outputSync().stdout,
  ).trim();
  Deno.writeTextFileSync(counter, "");
  const path = join(scratch.bin, "git");
  writeScript(
    path,
    `#!/bin/sh
echo >>'${counter}'
if [ "$(wc -l <'${counter}')" -eq ${call} ]; then
  echo "fatal: unable to read index file: Input/output error" >&2
  exit 128
fi
exec '${real}' "$@"
`,
  );
  return {
    countCalls: () => Deno.readTextFileSync(counter).length,
    end: () => Deno.removeSync(path),
  };
}

Deno.test({
  name: "a git that fails once moves no worktree aside and sends no agent elsewhere",
  ignore: Deno.build.os !== "linux",
  fn: async () => {
    const tally = new Tally("a git that fails once");
    const place = makePlace();
    const { scratch, worktree } = place;
    using _ = scratch;
    await makeWorktree(place, tally);
    leavePrecious(place);
    const counting = failAt(place, 0);
    await tick(scratch);
    const calls = Array.from({ length: counting.countCalls() }, (_, index) => index + 1);
    counting.end();
    const checkout = describeCheckout(scratch);
    const chosen = new Random("git").shuffle(calls).slice(0, IS_FULL ? 40 : 2);
    for (const call of chosen) {
      const lose = (loss: Parameters<Tally["lose"]>[0], what: string) =>
        tally.lose(loss, `call ${call}: ${what}`);
      tally.tried++;
      const before = readMemory(scratch);
      const failing = failAt(place, call);
      const result = await tick(scratch);
      failing.end();
      checkEnd(result, lose);
      const { reason, message, verdict, status } = result.json;
      if (verdict === null && !message) lose("other", `no words: ${reason}`);
      if (!existsSync(join(worktree, "precious.txt"))) {
        lose("states lost", "the worktree was moved");
      }
      const now = describeCheckout(scratch);
      if (now !== checkout) lose("other", `the checkout changed: ${now}`);
      if (status === "halted") {
        // Settings that cannot be read may be other ones.
        if (!/git's settings/.test(`${message}`)) lose("other", `halted: ${message}`);
        await runProgram(scratch, "status", ["--approve", "--loop", LOOP]);
      }
      checkWork(place, await tick(scratch), lose);
      for (const problem of listSetBacks(before, readMemory(scratch))) lose("states lost", problem);
    }
    tally.close();
  },
});

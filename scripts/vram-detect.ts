#!/usr/bin/env -S deno run -q --no-prompt -P=vram-detect
/**
 * vram-detect: how many tokens of context a model can hold on this machine.
 *
 * Prints one number with its derivation, or null with a reason. The number comes from the first of
 * AUTOMATON_CONTEXT_TOKENS, the window that models.json declares, and a model file (GGUF, a folder
 * with config.json and safetensors, an ollama manifest) measured against the memory of the machine.
 * There is no default: where nothing is known, nothing is claimed. The one place that keeps memory
 * back is computeBudget().
 *
 * A figure holds for llama.cpp and what is built on it (ollama), with flash attention and all layers
 * on the devices that count. Slots share the cells that keep the whole context, as llama-server's
 * unified cache does; each has its own window and recurrent state. Beside the fields that other
 * programs read, a model of models.json may name its projector: `"mmproj": "FILE.gguf"`.
 *
 * Reads: `<project>/.automaton/models.json`, else `<framework>/models.json` (outside a project the
 * framework counts as one); the model's files; on Linux /proc and /sys, through `sh`, because Deno
 * itself may not. Runs: nvidia-smi, rocm-smi, sysctl,
 * reg, powershell, sh, each with a deadline. Writes nothing.
 * Environment: AUTOMATON_CONTEXT_TOKENS, AUTOMATON_HOME, AUTOMATON_PROJECT, CUDA_VISIBLE_DEVICES,
 * HIP_VISIBLE_DEVICES, HOME, NO_COLOR, OLLAMA_MODELS, PATH, ROCR_VISIBLE_DEVICES, USERPROFILE.
 * Permissions: read, env, run; no network, no writing.
 * Exit codes: 0 a figure was found, 1 none could be, 2 usage error.
 *
 * @module
 */

import { parseArgs } from "@std/cli";
import { parse as parseJsonc } from "@std/jsonc";
import { basename, dirname, fromFileUrl, isAbsolute, join, resolve } from "@std/path";

// --- Constants ---

const KIB = 1024;
const MIB = 1024 * KIB;
const GIB = 1024 * MIB;

/** Smallest window, in tokens, in which a loop may run (the project's own rule). */
export const FLOOR_TOKENS = 16000;

/** A printed window is a multiple of this: llama.cpp pads a context to 256 cells (2026-09). */
const CONTEXT_STEP_TOKENS = 256;

/** llama.cpp's default physical batch, `--ubatch-size` (2026-09). */
const DEFAULT_UBATCH_TOKENS = 512;

/**
 * Kept back on each device for the driver, the screen and fragmentation: the larger of the two. A
 * share alone is too thin on 24 GB cards (llama.cpp's `--fit-target` is 1024 MiB, 2026-09).
 */
const HEADROOM_BYTES = 1024 * MIB;
const HEADROOM_SHARE = 0.03;

/**
 * Where a file names no vocabulary: the largest in common use (Gemma 3n, 262,400 rows with
 * padding, 2026-09), so that the compute buffer is never underestimated.
 */
const LARGEST_VOCAB_TOKENS = 262400;

/** One storage format of numbers: `blockBytes` hold `blockElements` of them. */
interface BlockFormat {
  blockElements: number;
  blockBytes: number;
}

/** Cache types that llama.cpp accepts for `--cache-type-k` and `-v` (ggml's block sizes, 2026-09). */
const KV_TYPES: Readonly<Record<string, BlockFormat>> = {
  f32: { blockElements: 1, blockBytes: 4 },
  f16: { blockElements: 1, blockBytes: 2 },
  bf16: { blockElements: 1, blockBytes: 2 },
  q8_0: { blockElements: 32, blockBytes: 34 },
  q5_1: { blockElements: 32, blockBytes: 24 },
  q5_0: { blockElements: 32, blockBytes: 22 },
  q4_1: { blockElements: 32, blockBytes: 20 },
  q4_0: { blockElements: 32, blockBytes: 18 },
  iq4_nl: { blockElements: 32, blockBytes: 18 },
};

/**
 * Tensor types by their number in a GGUF file: name, elements and bytes of a block (ggml.h and
 * ggml-common.h of llama.cpp, 2026-09). Numbers that are not here were removed or are not known.
 */
const TENSOR_TYPES: Readonly<Record<number, readonly [string, number, number]>> = {
  0: ["f32", 1, 4],
  1: ["f16", 1, 2],
  2: ["q4_0", 32, 18],
  3: ["q4_1", 32, 20],
  6: ["q5_0", 32, 22],
  7: ["q5_1", 32, 24],
  8: ["q8_0", 32, 34],
  9: ["q8_1", 32, 36],
  10: ["q2_k", 256, 84],
  11: ["q3_k", 256, 110],
  12: ["q4_k", 256, 144],
  13: ["q5_k", 256, 176],
  14: ["q6_k", 256, 210],
  15: ["q8_k", 256, 292],
  16: ["iq2_xxs", 256, 66],
  17: ["iq2_xs", 256, 74],
  18: ["iq3_xxs", 256, 98],
  19: ["iq1_s", 256, 50],
  20: ["iq4_nl", 32, 18],
  21: ["iq3_s", 256, 110],
  22: ["iq2_s", 256, 82],
  23: ["iq4_xs", 256, 136],
  24: ["i8", 1, 1],
  25: ["i16", 1, 2],
  26: ["i32", 1, 4],
  27: ["i64", 1, 8],
  28: ["f64", 1, 8],
  29: ["iq1_m", 256, 56],
  30: ["bf16", 1, 2],
  34: ["tq1_0", 256, 54],
  35: ["tq2_0", 256, 66],
  39: ["mxfp4", 32, 17],
  40: ["nvfp4", 64, 36],
  41: ["q1_0", 128, 18],
  42: ["q2_0", 64, 18],
};

/** Limits of a GGUF header. Real headers hold some fifty keys and a few thousand tensors. */
const GGUF_LIMITS = {
  readBytes: 64 * MIB,
  windowBytes: 64 * KIB,
  keys: 4096,
  /** The format allows 65,535; the longest in use is below 100. */
  keyBytes: 1024,
  /** Longer texts (chat templates, licences) are stepped over. */
  textBytes: 256,
  /** As in ggml's own reader. */
  length: 2 ** 30,
  tensors: 131072,
  /** ggml's GGML_MAX_NAME, with the final zero. */
  tensorNameBytes: 64,
  dimensions: 4,
  layers: 1024,
};

/** Value types of GGUF metadata with a fixed size, by number: bytes, reading (gguf.md, version 3). */
// deno-fmt-ignore -- a table: one row a line.
const GGUF_SCALARS: Readonly<Record<number, readonly [number, (view: DataView, at: number) => number]>> = {
  0: [1, (view, at) => view.getUint8(at)],
  1: [1, (view, at) => view.getInt8(at)],
  2: [2, (view, at) => view.getUint16(at, true)],
  3: [2, (view, at) => view.getInt16(at, true)],
  4: [4, (view, at) => view.getUint32(at, true)],
  5: [4, (view, at) => view.getInt32(at, true)],
  6: [4, (view, at) => view.getFloat32(at, true)],
  7: [1, (view, at) => view.getUint8(at)],
  10: [8, (view, at) => Number(view.getBigUint64(at, true))],
  11: [8, (view, at) => Number(view.getBigInt64(at, true))],
  12: [8, (view, at) => view.getFloat64(at, true)],
};
const GGUF_BOOL = 7;
const GGUF_STRING = 8;
const GGUF_ARRAY = 9;

/** How an architecture uses a sliding window. */
interface WindowRule {
  /** Window in tokens where the file has no `attention.sliding_window`. */
  defaultTokens?: number;
  /** Window in tokens whatever the file says, unless it says 0. */
  fixedTokens?: number;
  /** Every Nth layer attends to everything, where the file has no pattern. */
  period?: number;
  /** The full layer is the first of each N, not the last. */
  isFullFirst?: boolean;
  /** Only models with this many layers have a window. */
  onlyLayers?: number;
}

/** Which layers keep a recurrent state. */
type RecurrentRule =
  /** Every layer, and none attends. */
  | "all"
  /** Every layer, and each attends too. */
  | "beside"
  /** All but every Nth layer, N being `full_attention_interval`. */
  | "interval"
  /** Layers without KV heads. */
  | "headless"
  /** Layers without KV heads and without a feed-forward part. */
  | "headless-without-ff";

/** What sets an architecture apart from plain attention on every layer. */
interface ArchitectureRule {
  window?: WindowRule;
  recurrent?: RecurrentRule;
  /** Which numbers give the size of the recurrent state. */
  state?: "ssm" | "shortconv" | "wkv";
  /** For wkv: how many earlier embeddings are kept. */
  tokenShifts?: number;
  /** Layers that hold KV where the file has no `attention.shared_kv_layers`. */
  defaultKvLayers?: number;
  /** Keeps more than K and V in a way that is not known here. */
  isRefused?: boolean;
}

/** Architectures with K and V on every layer. phi3 and llama ignore `attention.sliding_window`. */
const PLAIN_ARCHITECTURES = "apertus arcee arctic baichuan bailingmoe bailingmoe2 bitnet bloom " +
  "chatglm codeshell command-r dbrx deci deepseek deepseek2 dots1 dream ernie4_5 ernie4_5-moe " +
  "exaone falcon gemma glm4 glm4moe gpt2 gptj gptneox granite granitemoe grok grovemoe " +
  "hunyuan-dense hunyuan-moe internlm2 jais llada llada-moe llama minicpm minicpm3 minimax-m2 " +
  "mistral3 mpt nemotron olmo olmoe openelm orion phi2 phi3 phimoe plamo plm qwen qwen2 qwen2moe " +
  "qwen2vl qwen3 qwen3moe qwen3vl qwen3vlmoe refact seed_oss smollm3 stablelm starcoder " +
  "starcoder2 xverse";

/**
 * The others (the load_hparams of each architecture in llama.cpp's sources, 2026-09). Where a layer
 * pattern is an array in the file, that array counts.
 */
const SPECIAL_ARCHITECTURES: Readonly<Record<string, ArchitectureRule>> = {
  "afmoe": { window: { period: 4 } },
  "cohere2": { window: { period: 4 } },
  "cohere2moe": { window: {} },
  "exaone-moe": { window: { period: 4 } },
  "exaone4": { window: { period: 4, onlyLayers: 64 } },
  "gemma2": { window: { period: 2, defaultTokens: 4096 } },
  "gemma3": { window: { period: 6 } },
  "gemma3n": { window: { period: 5 }, defaultKvLayers: 20 },
  "gemma4": { window: {} },
  "gpt-oss": { window: { period: 2 } },
  "llama4": { window: { period: 4, fixedTokens: 8192 } },
  "mimo2": { window: {} },
  "olmo2": { window: { period: 4 } },
  "smallthinker": { window: { period: 4, isFullFirst: true } },
  "step35": { window: {} },

  "falcon-h1": { recurrent: "beside", state: "ssm" },
  "granitehybrid": { recurrent: "headless", state: "ssm" },
  "jamba": { recurrent: "headless", state: "ssm" },
  "lfm2": { recurrent: "headless", state: "shortconv" },
  "lfm2moe": { recurrent: "headless", state: "shortconv" },
  "mamba": { recurrent: "all", state: "ssm" },
  "mamba2": { recurrent: "all", state: "ssm" },
  "nemotron_h": { recurrent: "headless-without-ff", state: "ssm" },
  "nemotron_h_moe": { recurrent: "headless-without-ff", state: "ssm" },
  "plamo2": { recurrent: "headless", state: "ssm" },
  "qwen35": { recurrent: "interval", state: "ssm" },
  "qwen35moe": { recurrent: "interval", state: "ssm" },
  "qwen3next": { recurrent: "interval", state: "ssm" },
  "arwkv7": { recurrent: "all", state: "wkv", tokenShifts: 1 },
  "rwkv6": { recurrent: "all", state: "wkv", tokenShifts: 2 },
  "rwkv6qwen2": { recurrent: "all", state: "wkv", tokenShifts: 1 },
  "rwkv7": { recurrent: "all", state: "wkv", tokenShifts: 2 },

  "deepseek32": { isRefused: true },
  "deepseek4": { isRefused: true },
  "glm-dsa": { isRefused: true },
};

/** qwen3next and qwen35 without `full_attention_interval` (llama.cpp, 2026-09). */
const DEFAULT_ATTENTION_INTERVAL = 4;

/** Keys, without the architecture's name, whose arrays hold one entry a layer and are kept. */
const PER_LAYER_KEYS: ReadonlySet<string> = new Set([
  "attention.head_count",
  "attention.head_count_kv",
  "attention.sliding_window_pattern",
  "feed_forward_length",
]);

/** `model_type` of a Hugging Face config.json → the architecture's name in GGUF files, if another. */
const HF_ARCHITECTURES: ReadonlyMap<string, string> = new Map([
  ["cohere", "command-r"],
  ["deepseek_v2", "deepseek2"],
  ["deepseek_v3", "deepseek2"],
  ["deepseek_v32", "deepseek32"],
  ["falcon_h1", "falcon-h1"],
  ["gemma3_text", "gemma3"],
  ["gemma3n_text", "gemma3n"],
  ["glm4_moe", "glm4moe"],
  ["glm_moe_dsa", "glm-dsa"],
  ["gpt_oss", "gpt-oss"],
  ["granitemoehybrid", "granitehybrid"],
  ["kimi_k2", "deepseek2"],
  ["lfm2_moe", "lfm2moe"],
  ["llama4_text", "llama4"],
  ["minimax_m2", "minimax-m2"],
  ["mistral", "llama"],
  ["mixtral", "llama"],
  ["phi", "phi2"],
  ["qwen2_moe", "qwen2moe"],
  ["qwen3_5", "qwen35"],
  ["qwen3_5_moe", "qwen35moe"],
  ["qwen3_moe", "qwen3moe"],
  ["qwen3_next", "qwen3next"],
]);

/** safetensors refuses headers above 100 MB; ours is bounded like GGUF's. */
const SAFETENSORS_HEADER_BYTES = 64 * MIB;

/** A probe that has not ended by then is killed. */
const PROBE_DEADLINE_MS = 5000;
/** What is kept of a probe's output; all of them print far less. */
const PROBE_OUTPUT_BYTES = 4 * MIB;

/** GPUs that share the machine's memory and therefore report none of their own (NVIDIA, 2026). */
const NVIDIA_UNIFIED = /\b(?:GB10|Thor|Orin)\b/;

/** Why the memory of a GPU that shares the machine's is unknown. */
const HOST_UNKNOWN = "the machine's memory could not be read";

/** An AMD GPU is an APU when it may borrow much more of the machine's memory than it owns. */
const APU_MIN_GTT_BYTES = 8 * GIB;
const APU_MIN_GTT_RATIO = 4;
const APU_MAX_VRAM_BYTES = 4 * GIB;

/** What helps when a model cannot be measured. */
const DECLARE_HINT = "declare context_tokens of the model in models.json";
/** What helps when a model's file is damaged. */
const DAMAGED_HINT = "compare the file's checksum, or download it again";

/** Share of memory that macOS lets the GPU use: larger machines allow more (llama.cpp and MLX discussions, 2025). */
const APPLE_SMALL_BYTES = 36 * GIB;
const APPLE_SMALL_SHARE = 2 / 3;
const APPLE_LARGE_SHARE = 3 / 4;

/** Limits of 2^62 and above mean "none" in cgroup v1, which has no word for it. */
const CGROUP_NO_LIMIT_BYTES = 2 ** 62;

const NVIDIA_QUERY = [
  "--query-gpu=index,uuid,name,memory.total,memory.free",
  "--format=csv,noheader,nounits",
] as const;
/** WSL keeps the driver's tools out of PATH. */
const NVIDIA_SMI_PATHS = ["nvidia-smi", "/usr/lib/wsl/lib/nvidia-smi"] as const;

const WINDOWS_DISPLAY_CLASS =
  "HKLM\\SYSTEM\\CurrentControlSet\\Control\\Class\\{4d36e968-e325-11ce-bfc1-08002be10318}";

/**
 * Prints what Linux tells about memory, each file under a line `==> path`. One process instead of
 * one for each file. A container sees its own limits at the root of the tree, a session further
 * down: every folder on the way up is shown.
 */
const LINUX_FACTS_SCRIPT = `
show() {
  for file in "$@"; do
    if [ -r "$file" ] && [ -f "$file" ]; then
      printf '\\n==> %s\\n' "$file"
      cat "$file"
    fi
  done
}
show /proc/meminfo /proc/driver/nvidia/version
for card in /sys/class/drm/card*; do
  case \${card##*/card} in *[!0-9]*) continue ;; esac
  show "$card"/device/vendor "$card"/device/uevent "$card"/device/mem_info_vram_total \\
    "$card"/device/mem_info_vram_used "$card"/device/mem_info_gtt_total \\
    "$card"/device/mem_info_gtt_used "$card"/lmem_total_bytes "$card"/lmem_avail_bytes \\
    "$card"/device/lmem_total_bytes "$card"/device/lmem_avail_bytes \\
    "$card"/device/tile*/physical_vram_size_bytes
done
while IFS=: read -r id kinds path; do
  case $id:,$kinds, in
    0:,,) root=/sys/fs/cgroup names='memory.max memory.current memory.stat' ;;
    *,memory,*)
      root=/sys/fs/cgroup/memory
      names='memory.limit_in_bytes memory.usage_in_bytes memory.stat'
      ;;
    *) continue ;;
  esac
  path=\${path%/}
  while :; do
    for name in $names; do show "$root$path/$name"; done
    [ -n "$path" ] || break
    path=\${path%/*}
  done
done </proc/self/cgroup
` as const;

// --- Types ---

/** Where the answer comes from. */
export type ContextSource = "env" | "models.json" | "gguf" | "hf" | "ollama" | "none";

/** A value of a model's header that is kept: texts, numbers, booleans as 0 and 1, one per layer. */
export type HeaderValue = string | number | readonly number[];

/** What a model file says about its model, whatever its format. */
export interface ModelHeader {
  /** Key → value, with GGUF's key names. */
  values: ReadonlyMap<string, HeaderValue>;
  /** Rows of the vocabulary, or null when the file does not tell. */
  vocabTokens: number | null;
}

/** A GGUF file's header and what its tensors add up to. */
export interface GgufFile extends ModelHeader {
  /** 2 or 3. */
  version: number;
  /** Tensors of this file. */
  tensorCount: number;
  /** Bytes of all tensors of this file, without padding. */
  tensorBytes: number;
  /**
   * Bytes after the data of the last tensor, more than padding explains: normally 0, else the list
   * of tensors may be damaged, and they count as weights.
   */
  surplusBytes: number;
  /** The file's size. */
  fileBytes: number;
  /** Bytes that were read to know this. */
  readBytes: number;
}

/** Random access to a file's bytes, so that the reader can be tested without files. */
export interface ByteSource {
  /** All bytes there are. */
  sizeBytes: number;
  /** Fills the start of `into` from `offset`; returns how many bytes there were. */
  readAt(offset: number, into: Uint8Array): number;
}

/** What one layer keeps. */
export interface LayerShape {
  /** K elements of one cell; 0 when the layer keeps none. */
  keyElements: number;
  /** V elements of one cell; 0 with MLA, where V is part of K. */
  valueElements: number;
  /** Whether it holds only the sliding window. */
  isSliding: boolean;
  /** Recurrent state of one slot, in bytes. */
  stateBytes: number;
}

/** What decides a model's memory. */
export interface ModelShape {
  /** The architecture's name in GGUF files. */
  architecture: string;
  /** One entry for each layer. */
  layers: readonly LayerShape[];
  /** Window of the sliding layers in tokens, 0 where there are none. */
  windowTokens: number;
  /** Elements of one embedding. */
  embeddingElements: number;
  /** Rows of the vocabulary. */
  vocabTokens: number;
  /** Largest context the model was made for, or null when the file does not tell. */
  nativeTokens: number | null;
  /** K and V elements of one head, which a quantised cache must divide into blocks. */
  headElements: readonly number[];
  /** Set when the true need may be lower: why. */
  upperBounds: readonly string[];
}

/** How the model is run. */
export interface CacheSettings {
  /** Type of K, a key of the table of cache types. */
  kvTypeK: string;
  /** Type of V. */
  kvTypeV: string;
  /** Sequences at the same time; they share the full-context cells. */
  slots: number;
  /** Tokens of a physical batch. */
  ubatchTokens: number;
}

/** What a context of `context_tokens` needs, in bytes. */
export interface MemoryAtContext {
  /** Cells of the full-context layers. */
  context_tokens: number;
  /** Weights and projector. */
  weights_bytes: number;
  /** Layers that keep the whole context. */
  kv_bytes: number;
  /** Layers that keep the sliding window. */
  kv_swa_bytes: number;
  /** Recurrent state of all slots. */
  recurrent_bytes: number;
  /** The compute buffer. */
  compute_bytes: number;
  /** All of it. */
  total_bytes: number;
}

/** One device's memory: a value, or unknown with a reason. A device that is absent is not listed. */
export interface DeviceReport {
  /** What tells it from the others: a card's uuid or name. */
  id: string;
  /** What it is called. */
  name: string;
  /** Whose memory it is: its own, shared with the machine, the machine itself, supposed. */
  kind: "discrete" | "integrated" | "cpu" | "what-if";
  /** All it has, or null when unknown. */
  total_bytes: number | null;
  /** What is free, or null when unknown. */
  free_bytes: number | null;
  /** Why `free_bytes` is null. */
  unknown_reason: string | null;
  /** What a reader should know about the figures, for example that they are estimates. */
  note: string | null;
}

/** What one way of asking found. */
export interface ProbeReport {
  /** What was asked about. */
  probe: string;
  /** Whether devices were found, cannot be known, or are not there. */
  state: "found" | "unknown" | "absent";
  /** Why unknown or absent; null when found. */
  reason: string | null;
  /** The devices found; of some the memory may be unknown. */
  devices: DeviceReport[];
}

/** How a probing program ended. */
export type ProbeOutput =
  | { end: "exited"; code: number; stdout: string; stderr: string }
  | { end: "missing" }
  | { end: "timeout"; deadlineMs: number }
  | { end: "failed"; message: string };

/** One device's part of the budget. */
export interface BudgetTerm {
  /** The device's name. */
  device: string;
  /** What is free on it. */
  free_bytes: number;
  /** What is kept back. */
  headroom_bytes: number;
  /** What is left for the model. */
  usable_bytes: number;
}

/** What the model may use. */
export interface MemoryBudget {
  /** Whose memory counts. */
  pool: "discrete" | "integrated" | "cpu" | "what-if";
  /** One entry for each device that counts. */
  terms: BudgetTerm[];
  /** What is usable on all of them. */
  total_bytes: number;
}

/** The budget with the answer that it leads to. */
export interface BudgetReport extends MemoryBudget {
  /** The largest context that fits, before it is rounded down. */
  exact_context_tokens: number;
  /** The largest context the model was made for, or null. */
  native_context_tokens: number | null;
  /** What keeps the answer from being larger. */
  limited_by: "memory" | "the native context";
}

/** A model file that was found and read. */
interface LoadedModel {
  source: "gguf" | "hf" | "ollama";
  path: string;
  files: number;
  header: ModelHeader;
  weightsBytes: number;
  projectorBytes: number;
  warnings: string[];
}

/** What `--json` prints; the field names are the contract. */
export interface DetectReport {
  /** Version of this object. */
  schema_version: 1;
  /** The answer, or null when none can be given. */
  available_context_tokens: number | null;
  /** The contract's old name for the same number: it counts tokens. */
  available_context_kb: number | null;
  /** Whether a loop may run. */
  loop_mode_eligible: boolean;
  /** The least that a loop needs. */
  floor_tokens: number;
  /** Why there is no answer or why no loop may run, else null. */
  reason: string | null;
  /** What to do next, or null. */
  hint: string | null;
  /** Where the answer comes from. */
  source: ContextSource;
  /** What was asked about, or null. */
  model: Record<string, string | number | boolean | null> | null;
  /** The devices that were found. */
  devices: DeviceReport[];
  /** How each way of asking ended. */
  probes: { probe: string; state: string; reason: string | null }[];
  /** Terms of the derivation in bytes, or null. */
  memory: Record<string, number> | null;
  /** What `--context` asked for, or null. */
  memory_at_context: MemoryAtContext | null;
  /** What the model may use, or null. */
  budget: BudgetReport | null;
  /** What the derivation takes for granted, or null. */
  assumptions: Record<string, string | number | boolean> | null;
  /** What a reader should know, one line each. */
  warnings: string[];
}

/** The command line, checked. */
interface DetectOptions {
  isJson: boolean;
  isExplain: boolean;
  isLoopMode: boolean;
  model: string | null;
  kvTypeK: string | null;
  kvTypeV: string | null;
  slots: number | null;
  ubatchTokens: number;
  contextTokens: number | null;
  freeMib: number | null;
}

// --- Shared ---

// #region shared:cli
/** One option of a command line. The table of these drives parsing, `--help` and the tests. */
export interface OptionSpec {
  /** Long name without the dashes. */
  readonly name: string;
  /** Placeholder of the value in `--help`; absent for a switch. */
  readonly value?: string;
  readonly help: string;
}

/** A command line that cannot be understood: exit code 2. */
export class UsageError extends Error {
  override name = "UsageError";
}

/** A request that is understood and refused or that failed: exit code 1. */
export class RefusedError extends Error {
  override name = "RefusedError";
  /** @param hint What to do next, one command where there is one. */
  constructor(message: string, readonly hint: string) {
    super(message);
  }
}

/**
 * Counts the single-character edits between two short words (Levenshtein distance).
 *
 * @example
 * ```ts
 * import { editDistance } from "./status.ts";
 * if (editDistance("loop", "lop") !== 1) throw new Error("wrong distance");
 * ```
 */
export function editDistance(a: string, b: string): number {
  let row = Array.from({ length: b.length + 1 }, (_, index) => index);
  for (let i = 1; i <= a.length; i++) {
    const next = [i];
    for (let j = 1; j <= b.length; j++) {
      const substituted = row[j - 1]! + (a[i - 1] === b[j - 1] ? 0 : 1);
      next.push(Math.min(row[j]! + 1, next[j - 1]! + 1, substituted));
    }
    row = next;
  }
  return row[b.length]!;
}

/**
 * Returns the candidate closest to a word, or null when none is within half of its length.
 *
 * @example
 * ```ts
 * import { findNearest } from "./status.ts";
 * if (findNearest("--lop", ["--loop", "--json"]) !== "--loop") throw new Error("not found");
 * ```
 */
export function findNearest(word: string, candidates: readonly string[]): string | null {
  let best: string | null = null;
  let bestDistance = Math.max(2, Math.floor(word.length / 2)) + 1;
  for (const candidate of candidates) {
    const distance = editDistance(word.slice(0, 64), candidate);
    if (distance < bestDistance) [best, bestDistance] = [candidate, distance];
  }
  return best;
}

function rejectUnknown(argument: string, options: readonly OptionSpec[]): never {
  if (!argument.startsWith("-")) {
    throw new UsageError(`Cannot read argument "${argument}": every value follows a flag`);
  }
  const flag = argument.split("=", 1)[0]!;
  const names = options.map((option) => `--${option.name}`);
  if (names.includes(flag)) {
    throw new UsageError(`Cannot read flag "${flag}": its value is missing`);
  }
  const nearest = findNearest(flag, names);
  const suggestion = nearest === null ? "see --help" : `did you mean ${nearest}?`;
  throw new UsageError(`Cannot read flag "${flag}": unknown (${suggestion})`);
}

/**
 * Reads a command line against a table of options.
 *
 * @returns The options given: a string for those with a value, true for switches.
 * @throws {UsageError} For an unknown flag, a missing value or a stray argument.
 *
 * @example
 * ```ts
 * import { parseCommandLine } from "./status.ts";
 * const options = [{ name: "loop", value: "NAME", help: "" }, { name: "json", help: "" }];
 * const given = parseCommandLine(["--loop=night", "--json"], options);
 * if (given.get("loop") !== "night" || given.get("json") !== true) throw new Error("misread");
 * ```
 */
export function parseCommandLine(
  args: readonly string[],
  options: readonly OptionSpec[],
): Map<string, string | true> {
  const valued = options.filter((option) => option.value !== undefined).map((o) => o.name);
  const switches = options.filter((option) => option.value === undefined).map((o) => o.name);
  const misused = switches.find((name) => args.some((word) => word.startsWith(`--${name}=`)));
  if (misused !== undefined) {
    throw new UsageError(`Cannot read flag "--${misused}": it takes no value`);
  }
  const parsed: Record<string, unknown> = parseArgs([...args], {
    string: [...valued, "_"],
    boolean: switches,
    unknown: (argument: string) => rejectUnknown(argument, options),
  });
  const strays = parsed._;
  if (Array.isArray(strays) && strays.length > 0) rejectUnknown(`${strays[0]}`, options);
  const given = new Map<string, string | true>();
  for (const name of valued) {
    const value = parsed[name];
    if (value === undefined) continue;
    if (typeof value !== "string" || value === "") {
      throw new UsageError(`Cannot read flag "--${name}": its value is missing`);
    }
    if (value.includes("\0")) throw new UsageError(`Cannot read flag "--${name}": a NUL byte`);
    given.set(name, value);
  }
  for (const name of switches) if (parsed[name] === true) given.set(name, true);
  return given;
}

/**
 * Reads an option's value as a whole number within bounds; undefined when it was not given.
 *
 * @example
 * ```ts
 * import { readWholeNumber } from "./status.ts";
 * const lines = readWholeNumber(new Map([["lines", "20"]]), "lines", { min: 1, max: 100 });
 * if (lines !== 20) throw new Error("misread");
 * ```
 */
export function readWholeNumber(
  given: ReadonlyMap<string, string | true>,
  name: string,
  { min, max }: { min: number; max: number },
): number | undefined {
  const text = given.get(name);
  if (text === undefined) return undefined;
  const value = /^\d{1,15}$/.test(`${text}`) ? Number(text) : NaN;
  if (value >= min && value <= max) return value;
  throw new UsageError(
    `Cannot read flag "--${name}": "${text}" is not a whole number from ${min} to ${max}`,
  );
}

/**
 * Lays out option lines for `--help`: flag and placeholder, then what it does.
 *
 * @example
 * ```ts
 * import { renderOptions } from "./status.ts";
 * const text = renderOptions([{ name: "lines", value: "N", help: "how many" }]);
 * if (text !== "  --lines N  how many\n") throw new Error(text);
 * ```
 */
export function renderOptions(options: readonly OptionSpec[]): string {
  const label = ({ name, value }: OptionSpec) =>
    `--${name}${value === undefined ? "" : ` ${value}`}`;
  const width = Math.max(...options.map((option) => label(option).length));
  return options.map((option) => `  ${label(option).padEnd(width)}  ${option.help}\n`).join("");
}

/** What to do about a failure; nothing for a usage error, whose one line says it all. */
function findHint(error: unknown): string | undefined {
  if (error instanceof UsageError) return undefined;
  if (error instanceof RefusedError) return error.hint;
  const isAboutContent = error instanceof SyntaxError || error instanceof TypeError;
  return isAboutContent
    ? "correct that file and try again"
    : "check who may read and write there, and that there is room left";
}

/** Prints how a program failed, in words on stderr and for `--json` as the last line of stdout. */
export function reportFailure(error: unknown, program: string, args: readonly string[]): number {
  const words = (error instanceof Error ? error.message : `${error}`).replace(/\p{Cc}+/gu, " ");
  // How Deno words what the system refused (2.6 and 2.9): "<problem> (os error <n>): <verb> '<path>'".
  const [, problem, verb, path] = /^(.+) \(os error \d+\): (\w+) '(.+)'$/.exec(words) ?? [];
  const message = path !== undefined
    ? `Cannot ${verb} "${path.replace("' -> '", '" to "')}": ${problem}`
    : words.startsWith("Cannot ")
    ? words
    : `Cannot go on: ${words}`;
  const hint = findHint(error);
  console.error(`${program}: ${message}`);
  if (hint !== undefined) console.error(`hint: ${hint}`);
  if (args.includes("--json")) {
    console.log(
      JSON.stringify({ schema_version: 1, ok: false, error: message, hint: hint ?? null }),
    );
  }
  return error instanceof UsageError ? 2 : 1;
}
// #endregion shared:cli

// #region shared:framework
/** What names of tasks, loops and templates look like; checked before a path is built from one. */
export const NAME_PATTERN = /^[a-z0-9][a-z0-9-]{0,62}$/;

/** Reads an environment variable; an empty one counts as absent. */
export function readEnv(name: string): string | undefined {
  return Deno.env.get(name) || undefined;
}

/** The checkout that holds scripts/, prompts/ and templates/ (also behind links, also compiled). */
export function findFrameworkDir(scriptUrl: string): string {
  const declared = readEnv("AUTOMATON_HOME");
  if (declared !== undefined) return resolve(declared);
  const program = Deno.build.standalone ? Deno.execPath() : fromFileUrl(scriptUrl);
  return dirname(dirname(Deno.realPathSync(program)));
}

/**
 * Finds the project folder: the flag, else AUTOMATON_PROJECT, else the nearest ancestor of the
 * working directory that holds `.automaton/`.
 *
 * @param mayCreate True for commands that make `.automaton/` in a project named outright.
 * @throws {RefusedError} Where there is no such folder.
 */
export function findProjectDir(flag: string | undefined, mayCreate: boolean): string {
  const named = flag ?? readEnv("AUTOMATON_PROJECT");
  if (named !== undefined) {
    const path = resolve(named);
    if (!isDirectory(path)) {
      throw new RefusedError(`Cannot open project "${path}": no such folder`, "check --project");
    }
    if (mayCreate || isDirectory(join(path, ".automaton"))) return path;
    throw new RefusedError(
      `Cannot open project "${path}": it holds no .automaton folder`,
      "status --create-task NAME --project DIR makes one",
    );
  }
  for (let path = Deno.cwd();; path = dirname(path)) {
    if (isDirectory(join(path, ".automaton"))) return path;
    if (dirname(path) === path) break;
  }
  throw new RefusedError(
    `Cannot find a project from "${Deno.cwd()}": no folder above it holds .automaton`,
    "name it with --project DIR",
  );
}

/** True when a path leads to a folder; false when to anything else or nothing. */
export function isDirectory(path: string): boolean {
  try {
    return Deno.statSync(path).isDirectory;
  } catch {
    return false; // Missing, unreadable or a loop of links: not a folder that can be used.
  }
}

/** The framework's version from its config.md; "unknown" where that cannot be read. */
export function readVersion(frameworkDir: string): string {
  const text = readTextIfPresent(join(frameworkDir, "config.md")) ?? "";
  return /^version:\s*(\S+)/m.exec(text)?.[1] ?? "unknown";
}

/**
 * A file's text, or null when there is no such file.
 *
 * @throws {TypeError} For a folder, a pipe or a device, which may never end.
 */
export function readTextIfPresent(path: string): string | null {
  try {
    if (Deno.statSync(path).isFile) return Deno.readTextFileSync(path);
  } catch (error) {
    if (error instanceof Deno.errors.NotFound || error instanceof Deno.errors.NotADirectory) {
      return null;
    }
    throw error;
  }
  throw new TypeError(`Cannot read "${path}": it is no regular file`);
}
// #endregion shared:framework

// #region shared:fields
/**
 * One rule about a field of a JSON object: its dotted path (`*` stands for every key), what it must be
 * in words, the test, and whether it may be absent.
 */
export type FieldRule = readonly [
  path: string,
  want: string,
  holds: (value: unknown) => boolean,
  presence?: "required",
];

/**
 * True for a JSON object: not null, not an array.
 *
 * @example
 * ```ts
 * import { isRecord } from "./status.ts";
 * if (!isRecord({}) || isRecord([]) || isRecord(null)) throw new Error("wrong");
 * ```
 */
export function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/**
 * Shortens any value to what fits in one line of an error message.
 *
 * @example
 * ```ts
 * import { describeValue } from "./status.ts";
 * if (describeValue({ a: [1] }) !== '{"a":[1]}') throw new Error("wrong");
 * ```
 */
export function describeValue(value: unknown): string {
  if (value === undefined) return "nothing";
  const text = JSON.stringify(value) ?? typeof value;
  return text.length > 60 ? `${text.slice(0, 57)}...` : text;
}

function listAtPath(root: unknown, path: string): [string, unknown][] {
  let found: [string, unknown][] = [["", root]];
  for (const key of path.split(".")) {
    found = found.flatMap(([prefix, value]): [string, unknown][] => {
      if (!isRecord(value)) return [];
      const keys = key === "*" ? Object.keys(value) : [key];
      return keys.map((k) => [prefix === "" ? k : `${prefix}.${k}`, value[k]]);
    });
  }
  return found;
}

/**
 * Checks a parsed JSON value against rules. An absent optional field passes; null does not, unless
 * its rule holds for null.
 *
 * @throws {TypeError} Names the file, the field, what was found and what was wanted.
 *
 * @example
 * ```ts
 * import { checkFields, type FieldRule } from "./status.ts";
 * const rules: FieldRule[] = [["tick", "a number", (value) => typeof value === "number", "required"]];
 * checkFields({ tick: 1, more: true }, rules, "a file");
 * ```
 */
export function checkFields(
  root: unknown,
  rules: readonly FieldRule[],
  where: string,
): asserts root is Record<string, unknown> {
  if (!isRecord(root)) {
    throw new TypeError(`Cannot use "${where}": found ${describeValue(root)}, wanted an object`);
  }
  for (const [pattern, want, holds, presence] of rules) {
    for (const [path, value] of listAtPath(root, pattern)) {
      if (value === undefined ? presence === undefined : holds(value)) continue;
      throw new TypeError(
        `Cannot use "${where}": field ${path}: found ${describeValue(value)}, wanted ${want}`,
      );
    }
  }
}

/**
 * Parses JSON (or JSONC by `parse`) and says where it came from when it does not parse.
 *
 * @example
 * ```ts
 * import { parseJsonText } from "./status.ts";
 * if (parseJsonText("[1]", "a file")?.toString() !== "1") throw new Error("misread");
 * ```
 */
export function parseJsonText(
  text: string,
  where: string,
  parse: (text: string) => unknown = JSON.parse,
): unknown {
  try {
    return parse(text.replace(/^\uFEFF/, ""));
  } catch (error) {
    const detail = text.trim() === "" ? "it is empty" : (error as Error).message;
    throw new SyntaxError(`Cannot parse "${where}": ${detail}`);
  }
}
// #endregion shared:fields

// #region shared:models
/** One model of models.json. */
export interface ModelEntry {
  readonly context_tokens?: number;
  readonly local?: boolean;
  readonly gguf?: string;
  readonly mmproj?: string;
  readonly kv_type?: string;
  readonly slots?: number;
}

/** models.json: which models there are and which of them count as the same. */
export interface ModelsFile {
  readonly path: string;
  readonly default?: string;
  readonly models: Readonly<Record<string, ModelEntry>>;
  readonly conflicts?: readonly (readonly [string, string])[];
}

const isPositiveInteger = (value: unknown): boolean =>
  Number.isSafeInteger(value) && Number(value) > 0;

// deno-fmt-ignore -- a table: one row a line.
const MODELS_RULES: readonly FieldRule[] = [
  ["models", "an object of models", isRecord, "required"],
  ["models.*", "an object", isRecord],
  ["models.*.context_tokens", "a whole number above 0", isPositiveInteger],
  ["models.*.local", "true or false", (v) => typeof v === "boolean"],
  ["models.*.gguf", "a path", (v) => typeof v === "string" && v !== ""],
  ["models.*.mmproj", "a path", (v) => typeof v === "string" && v !== ""],
  ["models.*.kv_type", "a type's name", (v) => typeof v === "string"],
  ["models.*.slots", "a whole number above 0", isPositiveInteger],
  ["default", "a model's name", (v) => typeof v === "string" && v !== ""],
  ["conflicts", "a list of pairs of model names", (v) => Array.isArray(v) && v.every((pair) => Array.isArray(pair) && pair.length === 2 && pair.every((name) => typeof name === "string") )],
];

/**
 * Reads `<project>/.automaton/models.json`, else `<framework>/models.json` (JSONC accepted).
 *
 * @returns null when there is neither.
 * @throws {SyntaxError|TypeError} For a file that is there and cannot be used.
 */
export function readModels(projectDir: string, frameworkDir: string): ModelsFile | null {
  const candidates = [
    join(projectDir, ".automaton", "models.json"),
    join(frameworkDir, "models.json"),
  ];
  for (const path of candidates) {
    const text = readTextIfPresent(path);
    if (text === null) continue;
    const parsed = parseJsonText(text, path, parseJsonc);
    checkFields(parsed, MODELS_RULES, path);
    const fields = parsed as unknown as Omit<ModelsFile, "path">;
    return { ...fields, path };
  }
  return null;
}
// #endregion shared:models

// --- Pure helpers ---

/** A refusal with what helps whenever a model cannot be measured: saying what its window is. */
function refusal(message: string, hint = DECLARE_HINT): RefusedError {
  return new RefusedError(message, hint);
}

/**
 * Bytes of `elements` numbers in a cache type.
 *
 * @param type One of f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0, iq4_nl.
 * @param elements How many, a multiple of the type's block.
 * @returns Bytes.
 * @throws RefusedError for an unknown type.
 *
 * @example
 * ```ts
 * import { assertEquals } from "@std/assert";
 * assertEquals(rowBytes("q8_0", 1024), 1088);
 * ```
 */
export function rowBytes(type: string, elements: number): number {
  const format = KV_TYPES[type];
  if (format === undefined) throw refusal(`Cannot size cache type "${type}": not known`);
  return (elements / format.blockElements) * format.blockBytes;
}

function padTo(value: number, step: number): number {
  return Math.ceil(value / step) * step;
}

/**
 * What a model needs for a context, term by term.
 *
 * Source of the formulas: llama.cpp's llama-kv-cache, llama-kv-cache-iswa (the window's cells:
 * window·slots + ubatch, padded to 256), llama-memory-recurrent and the logs of its compute
 * buffers with flash attention, 2026-09.
 *
 * @param model The model's shape and the bytes of its weights, projector included.
 * @param settings How it is run.
 * @param contextTokens Cells of the full-context layers, at least 0.
 * @returns Bytes by term.
 *
 * @example
 * ```ts
 * import { assertEquals } from "@std/assert";
 * const layer = { keyElements: 1024, valueElements: 1024, isSliding: false, stateBytes: 0 };
 * const shape = {
 *   architecture: "llama", layers: Array(32).fill(layer), windowTokens: 0, embeddingElements: 4096,
 *   vocabTokens: 128256, nativeTokens: 8192, headElements: [128], upperBounds: [],
 * };
 * const settings = { kvTypeK: "f16", kvTypeV: "f16", slots: 1, ubatchTokens: 512 };
 * assertEquals(memoryAtContext({ shape, weightsBytes: 0 }, settings, 8192).kv_bytes, 2 ** 30);
 * ```
 */
export function memoryAtContext(
  model: { shape: ModelShape; weightsBytes: number },
  settings: CacheSettings,
  contextTokens: number,
): MemoryAtContext {
  const { shape, weightsBytes } = model;
  const perCell = bytesPerCell(shape, settings);
  const recurrent = sumOf(shape.layers, (layer) => layer.stateBytes) * settings.slots;
  const compute = 4 * settings.ubatchTokens *
    (shape.embeddingElements + shape.vocabTokens + contextTokens);
  const kv = perCell.full * contextTokens;
  const kvSwa = perCell.sliding * slidingCells(shape, settings, contextTokens);
  return {
    context_tokens: contextTokens,
    weights_bytes: weightsBytes,
    kv_bytes: kv,
    kv_swa_bytes: kvSwa,
    recurrent_bytes: recurrent,
    compute_bytes: compute,
    total_bytes: weightsBytes + kv + kvSwa + recurrent + compute,
  };
}

/** Cells that a sliding layer holds. */
function slidingCells(shape: ModelShape, settings: CacheSettings, contextTokens: number): number {
  const window = shape.windowTokens * settings.slots + settings.ubatchTokens;
  return padTo(Math.min(contextTokens, window), CONTEXT_STEP_TOKENS);
}

/** K and V bytes of one cell, summed over the layers that keep everything and those that slide. */
function bytesPerCell(
  shape: ModelShape,
  settings: CacheSettings,
): { full: number; sliding: number } {
  const cell = (layer: LayerShape) =>
    rowBytes(settings.kvTypeK, layer.keyElements) + rowBytes(settings.kvTypeV, layer.valueElements);
  return {
    full: sumOf(shape.layers, (layer) => layer.isSliding ? 0 : cell(layer)),
    sliding: sumOf(shape.layers, (layer) => layer.isSliding ? cell(layer) : 0),
  };
}

function sumOf<T>(items: readonly T[], measure: (item: T) => number): number {
  return items.reduce((sum, item) => sum + measure(item), 0);
}

/**
 * The largest context whose memory fits.
 *
 * @param model The model's shape and the bytes of its weights.
 * @param settings How it is run.
 * @param budgetBytes What may be used.
 * @returns Tokens, never above the model's native context; 0 when not even one fits.
 */
export function largestContext(
  model: { shape: ModelShape; weightsBytes: number },
  settings: CacheSettings,
  budgetBytes: number,
): number {
  let fits = 0;
  let tooLarge = (model.shape.nativeTokens ?? 2 ** 31) + 1;
  while (tooLarge - fits > 1) {
    const middle = Math.floor((fits + tooLarge) / 2);
    if (memoryAtContext(model, settings, middle).total_bytes <= budgetBytes) fits = middle;
    else tooLarge = middle;
  }
  return fits;
}

/**
 * Chooses the pool of memory that a model would use and keeps the headroom back, here and nowhere
 * else. Pools are never added: cards of their own count before a GPU that shares the machine's
 * memory, and that before the machine's memory itself. A card whose memory is unknown is not taken
 * for absent: where no other card answers, there is no budget.
 *
 * @param devices All devices found.
 * @returns The budget; a device with less free than its headroom adds nothing.
 * @throws RefusedError when no device's free memory is known.
 *
 * @example
 * ```ts
 * import { assertEquals } from "@std/assert";
 * const card = { id: "0", name: "card", kind: "discrete" as const, unknown_reason: null, note: null };
 * const gib = 2 ** 30;
 * const budget = computeBudget([{ ...card, total_bytes: 24 * gib, free_bytes: 20 * gib }]);
 * assertEquals(budget.total_bytes, 19 * gib);
 * ```
 */
export function computeBudget(devices: readonly DeviceReport[]): MemoryBudget {
  for (const pool of ["what-if", "discrete", "integrated", "cpu"] as const) {
    // A card too small to hold anything (a screen's 512 MiB) is no place for a model.
    const members = devices.filter((device) =>
      device.kind === pool &&
      (pool === "what-if" || (device.total_bytes ?? GIB + 1) > HEADROOM_BYTES)
    );
    const terms = members.flatMap((device) => budgetTerm(device) ?? []);
    if (terms.length > 0) return newBudget(pool, terms);
    const unknown = members[0];
    if (unknown !== undefined) {
      throw refusal(
        `free memory of ${unknown.name} is unknown: ${unknown.unknown_reason}`,
        "vram-detect --free-mib N (what is free on it, in MiB)",
      );
    }
  }
  throw refusal("no device's memory could be read", "vram-detect --free-mib N");
}

function newBudget(pool: MemoryBudget["pool"], terms: BudgetTerm[]): MemoryBudget {
  // Several integrated entries are views of the same memory: the largest counts.
  const counted = pool === "integrated"
    ? terms.toSorted((a, b) => b.usable_bytes - a.usable_bytes).slice(0, 1)
    : terms;
  return { pool, terms: counted, total_bytes: sumOf(counted, (term) => term.usable_bytes) };
}

function budgetTerm(device: DeviceReport): BudgetTerm | null {
  if (device.free_bytes === null) return null;
  const total = device.total_bytes ?? device.free_bytes;
  const headroom = Math.max(HEADROOM_BYTES, Math.ceil(total * HEADROOM_SHARE));
  return {
    device: device.name,
    free_bytes: device.free_bytes,
    headroom_bytes: headroom,
    usable_bytes: Math.max(0, device.free_bytes - headroom),
  };
}

function findArchitectureRule(architecture: string): ArchitectureRule | null {
  if (Object.hasOwn(SPECIAL_ARCHITECTURES, architecture)) {
    return SPECIAL_ARCHITECTURES[architecture] ?? null;
  }
  return PLAIN_ARCHITECTURES.split(" ").includes(architecture) ? {} : null;
}

/** Reads checked numbers of one architecture from a header. */
interface HeaderView {
  architecture: string;
  header: ModelHeader;
  has(key: string): boolean;
  /** A whole number from 0 to 2^31, or `fallback` where the key is missing. */
  count(key: string, fallback?: number): number;
  /** One whole number for each layer, or null where the key is missing. */
  perLayer(key: string, layers: number): readonly number[] | null;
}

function viewHeader(header: ModelHeader): HeaderView {
  const architecture = header.values.get("general.architecture");
  if (typeof architecture !== "string" || architecture === "") {
    throw refusal("Cannot size model: general.architecture is missing");
  }
  const fullKey = (key: string) => `${architecture}.${key}`;
  return {
    architecture,
    header,
    has: (key) => header.values.has(fullKey(key)),
    count(key, fallback) {
      const value = header.values.get(fullKey(key)) ?? fallback;
      if (value !== undefined) return checkCount(fullKey(key), value);
      throw refusal(`Cannot size model: ${fullKey(key)} is missing`);
    },
    perLayer(key, layers) {
      const value = header.values.get(fullKey(key));
      if (value === undefined) return null;
      if (typeof value !== "object") {
        return Array<number>(layers).fill(checkCount(fullKey(key), value));
      }
      if (value.length >= layers) return value.map((item) => checkCount(fullKey(key), item));
      throw refusal(
        `Cannot size model: ${fullKey(key)} has ${value.length} entries for ${layers} layers`,
      );
    },
  };
}

function checkCount(key: string, value: HeaderValue): number {
  if (typeof value === "number" && Number.isSafeInteger(value) && value >= 0 && value <= 2 ** 31) {
    return value;
  }
  throw refusal(`Cannot size model: ${key} is ${JSON.stringify(value)}`);
}

/**
 * What a header says about memory: the layers with what each keeps, the window, the vocabulary.
 *
 * Source: the load_hparams of llama.cpp's architectures and llama-hparams.cpp, 2026-09.
 *
 * @param header A model's header, GGUF's key names.
 * @returns The shape.
 * @throws RefusedError when a number is missing or out of range, or when the architecture keeps
 * something whose size is not known (an indexer's cache, an unknown recurrent state).
 */
export function describeModel(header: ModelHeader): ModelShape {
  const view = viewHeader(header);
  const rule = findArchitectureRule(view.architecture);
  refuseUnknownCaches(view, rule);
  const layerCount = view.count("block_count") - view.count("nextn_predict_layers", 0);
  if (layerCount < 1 || layerCount > GGUF_LIMITS.layers) {
    throw refusal(`Cannot size model: ${layerCount} layers`);
  }
  const upperBounds: string[] = [];
  if (rule === null) {
    upperBounds.push(
      `architecture "${view.architecture}" is not known: every layer counts as full`,
    );
  }
  const heads = readHeads(view, rule ?? {}, layerCount);
  const window = readWindow(view, rule?.window, layerCount, upperBounds);
  return {
    architecture: view.architecture,
    layers: buildLayers(view, rule ?? {}, heads, window),
    windowTokens: window.tokens,
    embeddingElements: view.count("embedding_length"),
    vocabTokens: readVocab(view, upperBounds),
    nativeTokens: view.has("context_length") ? view.count("context_length") : null,
    headElements: [...heads.elements, ...heads.slidingElements].filter((size) => size > 0),
    upperBounds,
  };
}

function refuseUnknownCaches(view: HeaderView, rule: ArchitectureRule | null): void {
  const keys = [...view.header.values.keys()];
  const indexer = keys.find((key) => key.startsWith(`${view.architecture}.attention.indexer.`));
  if (rule?.isRefused || indexer !== undefined) {
    throw refusal(
      `Cannot size model: ${indexer ?? `architecture "${view.architecture}"`} ` +
        "means an indexer with a cache of its own, whose size is not known",
    );
  }
  const state = keys.find((key) => /^[^.]+\.(?:ssm|wkv|kda|shortconv)\./.test(key));
  if (rule === null && state !== undefined) {
    throw refusal(
      `Cannot size model: architecture "${view.architecture}" is not known and ${state} ` +
        "means a recurrent state",
    );
  }
}

/** Attention heads: how many hold KV on each layer, and K and V elements of one. */
interface HeadCounts {
  kv: readonly number[];
  elements: readonly [number, number];
  slidingElements: readonly [number, number];
}

function readHeads(view: HeaderView, rule: ArchitectureRule, layerCount: number): HeadCounts {
  if (rule.recurrent === "all") {
    const none = [0, 0] as const;
    return { kv: Array<number>(layerCount).fill(0), elements: none, slidingElements: none };
  }
  const query = view.perLayer("attention.head_count", layerCount);
  const kv = view.perLayer("attention.head_count_kv", layerCount) ?? query;
  if (kv === null) view.count("attention.head_count");
  const mostHeads = Math.max(0, ...(query ?? []));
  const derived = mostHeads > 0
    ? Math.floor(view.count("embedding_length") / mostHeads)
    : undefined;
  const key = view.count("attention.key_length", derived);
  const value = view.count("attention.value_length", derived);
  const hasKeyMla = view.has("attention.key_length_mla");
  if (hasKeyMla !== view.has("attention.value_length_mla")) {
    throw refusal("Cannot size model: only one of the two _mla lengths is there");
  }
  return {
    kv: kv ?? [],
    elements: [key, hasKeyMla ? 0 : value],
    slidingElements: [
      view.count("attention.key_length_swa", key),
      hasKeyMla ? 0 : view.count("attention.value_length_swa", value),
    ],
  };
}

/** The sliding window of a model and the layers that use it. */
interface WindowShape {
  tokens: number;
  isSliding: readonly boolean[];
}

function readWindow(
  view: HeaderView,
  rule: WindowRule | undefined,
  layerCount: number,
  upperBounds: string[],
): WindowShape {
  const none = { tokens: 0, isSliding: Array<boolean>(layerCount).fill(false) };
  if (rule === undefined) return none;
  if (rule.onlyLayers !== undefined && rule.onlyLayers !== layerCount) return none;
  const stated = view.count(
    "attention.sliding_window",
    rule.fixedTokens ?? rule.defaultTokens ?? 0,
  );
  if (stated === 0) return none;
  const tokens = rule.fixedTokens ?? stated;
  const pattern = view.header.values.get(`${view.architecture}.attention.sliding_window_pattern`);
  if (typeof pattern === "object") {
    const flags = view.perLayer("attention.sliding_window_pattern", layerCount) ?? [];
    return { tokens, isSliding: flags.slice(0, layerCount).map((flag) => flag !== 0) };
  }
  if (pattern === undefined && rule.period === undefined) {
    upperBounds.push("the file does not say which layers slide: every layer counts as full");
    return none;
  }
  const period = view.count("attention.sliding_window_pattern", rule.period);
  return { tokens, isSliding: none.isSliding.map((_, layer) => slides(layer, period, rule)) };
}

function slides(layer: number, period: number, rule: WindowRule): boolean {
  if (period === 0) return true;
  return rule.isFullFirst ? layer % period !== 0 : layer % period < period - 1;
}

function buildLayers(
  view: HeaderView,
  rule: ArchitectureRule,
  heads: HeadCounts,
  window: WindowShape,
): LayerShape[] {
  const layerCount = window.isSliding.length;
  const recurrent = findRecurrentLayers(view, rule, heads, layerCount);
  const stateBytes = rule.state === undefined ? 0 : readStateBytes(view, rule);
  const shared = view.count(
    "attention.shared_kv_layers",
    Math.max(0, layerCount - (rule.defaultKvLayers ?? layerCount)),
  );
  return window.isSliding.map((isSliding, layer) => {
    const isRecurrent = recurrent[layer] ?? false;
    const attends = layer < layerCount - shared && (!isRecurrent || rule.recurrent === "beside");
    const kvHeads = attends ? heads.kv[layer] ?? 0 : 0;
    const [key, value] = isSliding ? heads.slidingElements : heads.elements;
    return {
      keyElements: key * kvHeads,
      valueElements: value * kvHeads,
      isSliding,
      stateBytes: isRecurrent ? stateBytes : 0,
    };
  });
}

function findRecurrentLayers(
  view: HeaderView,
  rule: ArchitectureRule,
  heads: HeadCounts,
  layerCount: number,
): boolean[] {
  const layers = Array.from({ length: layerCount }, (_, layer) => layer);
  switch (rule.recurrent) {
    case "all":
    case "beside":
      return layers.map(() => true);
    case "headless":
      return layers.map((layer) => heads.kv[layer] === 0);
    case "headless-without-ff": {
      const ff = view.perLayer("feed_forward_length", layerCount);
      return layers.map((layer) => heads.kv[layer] === 0 && (ff?.[layer] ?? 0) === 0);
    }
    case "interval": {
      const interval = view.count("full_attention_interval", DEFAULT_ATTENTION_INTERVAL);
      if (interval === 0) throw refusal("Cannot size model: full_attention_interval is 0");
      return layers.map((layer) => (layer + 1) % interval !== 0);
    }
    default:
      return layers.map(() => false);
  }
}

/** Bytes of one layer's recurrent state for one slot, whatever the context; numbers are f32. */
function readStateBytes(view: HeaderView, rule: ArchitectureRule): number {
  const embedding = view.count("embedding_length");
  switch (rule.state) {
    case "shortconv":
      return 4 * embedding * Math.max(0, view.count("shortconv.l_cache") - 1);
    case "wkv":
      return 4 * embedding * ((rule.tokenShifts ?? 0) + view.count("wkv.head_size"));
    default: {
      const inner = view.count("ssm.inner_size");
      const state = view.count("ssm.state_size");
      const groups = view.count("ssm.group_count", 0);
      const columns = Math.max(0, view.count("ssm.conv_kernel") - 1);
      return 4 * (columns * (inner + 2 * groups * state) + state * inner);
    }
  }
}

function readVocab(view: HeaderView, upperBounds: string[]): number {
  if (view.header.vocabTokens !== null) return view.header.vocabTokens;
  if (view.has("vocab_size")) return view.count("vocab_size");
  upperBounds.push(`the file names no vocabulary: ${LARGEST_VOCAB_TOKENS} tokens are assumed`);
  return LARGEST_VOCAB_TOKENS;
}

function checkCacheTypes(shape: ModelShape, settings: CacheSettings): void {
  for (const type of [settings.kvTypeK, settings.kvTypeV]) {
    const block = KV_TYPES[type]?.blockElements ?? 1;
    const odd = shape.headElements.find((size) => size % block !== 0);
    if (odd !== undefined) {
      throw refusal(
        `Cannot use cache type "${type}": its block of ${block} does not divide a head of ${odd}`,
        "vram-detect --kv-type f16",
      );
    }
  }
}

// --- Parsing and formatting ---

/** Walks through a GGUF header with a bounded window and a bounded number of bytes read. */
class GgufCursor {
  offset = 0;
  readBytes = 0;
  #window: Uint8Array;
  #view: DataView;
  #windowStart = 0;
  #windowBytes = 0;
  #decoder = new TextDecoder("utf-8", { fatal: true });

  constructor(readonly source: ByteSource, readonly path: string) {
    this.#window = new Uint8Array(Math.min(GGUF_LIMITS.windowBytes, Math.max(source.sizeBytes, 1)));
    this.#view = new DataView(this.#window.buffer);
  }

  get leftBytes(): number {
    return this.source.sizeBytes - this.offset;
  }

  /** The error for something wrong at `offset`. */
  refuse(found: string, offset = this.offset): RefusedError {
    const message = `Cannot read GGUF file "${this.path}": ${found} at offset ${offset}`;
    return refusal(message, DAMAGED_HINT);
  }

  /** Makes `bytes` bytes available and steps over them; returns where they start in the window. */
  #take(bytes: number, what: string): number {
    if (bytes > this.leftBytes) throw this.refuse(`the file ends inside ${what}`);
    const end = this.#windowStart + this.#windowBytes;
    if (this.offset < this.#windowStart || this.offset + bytes > end) this.#fill(bytes, what);
    const start = this.offset - this.#windowStart;
    this.offset += bytes;
    return start;
  }

  #fill(bytes: number, what: string): void {
    this.#windowStart = this.offset;
    this.#windowBytes = this.source.readAt(this.offset, this.#window);
    this.readBytes += this.#windowBytes;
    if (this.#windowBytes < bytes) throw this.refuse(`the file ends inside ${what}`);
    if (this.readBytes > GGUF_LIMITS.readBytes) {
      throw this.refuse(`the header is larger than ${GGUF_LIMITS.readBytes} bytes`);
    }
  }

  u32(what: string): number {
    return this.#view.getUint32(this.#take(4, what), true);
  }

  /** An unsigned 64-bit number; above 2^53 it is refused, no such length can be true. */
  u64(what: string): number {
    const start = this.#take(8, what);
    const high = this.#view.getUint32(start + 4, true);
    if (high >= 2 ** 21) throw this.refuse(`${what} is negative or above 2^53`, this.offset - 8);
    return high * 2 ** 32 + this.#view.getUint32(start, true);
  }

  /** A length, bounded by the format's limit and by what is left of the file. */
  length(what: string, bytesEach: number): number {
    const length = this.u64(what);
    const start = this.offset - 8;
    if (length > GGUF_LIMITS.length) throw this.refuse(`${what} is ${length}, above 2^30`, start);
    if (length * bytesEach > this.leftBytes) {
      throw this.refuse(`${what} is ${length}, past the end of the file`, start);
    }
    return length;
  }

  text(bytes: number, what: string): string {
    const start = this.#take(bytes, what);
    try {
      return this.#decoder.decode(this.#window.subarray(start, start + bytes));
    } catch {
      throw this.refuse(`${what} is not UTF-8`, this.offset - bytes);
    }
  }

  skip(bytes: number, what: string): void {
    if (bytes > this.leftBytes) throw this.refuse(`the file ends inside ${what}`);
    this.offset += bytes;
  }

  /** A value of one of the fixed-size types; null where `type` is none of them. */
  scalar(type: number, what: string): number | null {
    const format = GGUF_SCALARS[type];
    if (format === undefined) return null;
    const [bytes, read] = format;
    const value = read(this.#view, this.#take(bytes, what));
    if (type !== GGUF_BOOL || value <= 1) return value;
    throw this.refuse(`${what} is a boolean of value ${value}`, this.offset - 1);
  }
}

/**
 * Reads a GGUF file's header: metadata that matters for memory and the sizes of its tensors. Big
 * arrays are stepped over; never more than 64 MiB are read and 64 KiB held.
 *
 * Source of the format: ggml's gguf.md and gguf.cpp, versions 2 and 3, checked 2026-09.
 *
 * @param source The file.
 * @param path Its path, for messages.
 * @returns What the header says.
 * @throws RefusedError naming what is wrong and at which offset.
 */
export function readGguf(source: ByteSource, path: string): GgufFile {
  const cursor = new GgufCursor(source, path);
  const version = readGgufVersion(cursor);
  const tensorCount = cursor.length("the number of tensors", 1);
  if (tensorCount > GGUF_LIMITS.tensors) throw cursor.refuse(`${tensorCount} tensors`, 8);
  const keyCount = cursor.length("the number of keys", 1);
  if (keyCount > GGUF_LIMITS.keys) throw cursor.refuse(`${keyCount} keys`, 16);

  const { values, vocabTokens } = readGgufMetadata(cursor, keyCount);
  const tensors = readGgufTensors(cursor, tensorCount, readAlignment(cursor, values));
  checkBlocks(cursor, values, tensors.highestBlock);
  return {
    version,
    values,
    vocabTokens: vocabTokens ?? tensors.vocabTokens,
    tensorCount,
    tensorBytes: tensors.bytes,
    surplusBytes: tensors.surplusBytes,
    fileBytes: source.sizeBytes,
    readBytes: cursor.readBytes,
  };
}

function readGgufVersion(cursor: GgufCursor): number {
  const magic = cursor.u32("the magic number");
  // The four letters GGUF, read as a little-endian number.
  if (magic !== 0x46554747) throw cursor.refuse("no GGUF magic number", 0);
  const version = cursor.u32("the version");
  if ((version & 0xffff) === 0 && version !== 0) {
    throw cursor.refuse("a big-endian file (its bytes are swapped)", 4);
  }
  if (version === 2 || version === 3) return version;
  throw cursor.refuse(`version ${version}, only 2 and 3 are known`, 4);
}

function readGgufKey(cursor: GgufCursor, seen: Set<string>): string {
  const start = cursor.offset;
  const bytes = cursor.length("a key's length", 1);
  if (bytes === 0) throw cursor.refuse("an empty key", start);
  if (bytes > GGUF_LIMITS.keyBytes) throw cursor.refuse(`a key of ${bytes} bytes`, start);
  const key = cursor.text(bytes, "a key");
  if (seen.has(key)) throw cursor.refuse(`the key "${key}" a second time`, start);
  seen.add(key);
  return key;
}

function readGgufMetadata(cursor: GgufCursor, keyCount: number): ModelHeader {
  const values = new Map<string, HeaderValue>();
  const seen = new Set<string>();
  let vocabTokens: number | null = null;
  for (let index = 0; index < keyCount; index++) {
    const key = readGgufKey(cursor, seen);
    const type = cursor.u32(`the type of "${key}"`);
    if (type === GGUF_ARRAY) {
      const { length, items } = readGgufArray(cursor, key);
      if (key === "tokenizer.ggml.tokens") vocabTokens = length;
      if (items !== null) values.set(key, items);
      continue;
    }
    const value = readGgufScalar(cursor, type, key);
    if (value !== null) values.set(key, value);
  }
  return { values, vocabTokens };
}

/** Reads one value that is no array; null for a long text, which is stepped over. */
function readGgufScalar(cursor: GgufCursor, type: number, key: string): string | number | null {
  if (type === GGUF_STRING) return readGgufText(cursor, key);
  const value = cursor.scalar(type, `"${key}"`);
  if (value === null) throw cursor.refuse(`"${key}" of type ${type}`, cursor.offset - 4);
  return value;
}

function readGgufText(cursor: GgufCursor, key: string): string | null {
  const bytes = cursor.length(`the length of "${key}"`, 1);
  if (bytes <= GGUF_LIMITS.textBytes) return cursor.text(bytes, `"${key}"`);
  cursor.skip(bytes, `"${key}"`);
  return null;
}

/** Reads an array's length, and its items where they matter for memory; else steps over them. */
function readGgufArray(
  cursor: GgufCursor,
  key: string,
): { length: number; items: readonly number[] | null } {
  const type = cursor.u32(`the element type of "${key}"`);
  if (type === GGUF_STRING) return { length: skipGgufTexts(cursor, key), items: null };
  const size = GGUF_SCALARS[type]?.[0];
  if (size === undefined) {
    const found = type === GGUF_ARRAY ? "an array of arrays" : `an array of type ${type}`;
    throw cursor.refuse(`"${key}" is ${found}`, cursor.offset - 4);
  }
  const length = cursor.length(`the length of "${key}"`, size);
  if (length > GGUF_LIMITS.layers || !PER_LAYER_KEYS.has(key.slice(key.indexOf(".") + 1))) {
    cursor.skip(length * size, `"${key}"`);
    return { length, items: null };
  }
  return { length, items: Array.from({ length }, () => cursor.scalar(type, `"${key}"`) ?? 0) };
}

function skipGgufTexts(cursor: GgufCursor, key: string): number {
  const length = cursor.length(`the length of "${key}"`, 8);
  for (let index = 0; index < length; index++) {
    cursor.skip(cursor.length(`a text's length in "${key}"`, 1), `"${key}"`);
  }
  return length;
}

function readAlignment(cursor: GgufCursor, values: ReadonlyMap<string, HeaderValue>): number {
  const alignment = values.get("general.alignment") ?? 32;
  const isPowerOfTwo = typeof alignment === "number" && Number.isInteger(Math.log2(alignment));
  if (isPowerOfTwo && alignment >= 1 && alignment <= MIB) return alignment;
  throw cursor.refuse(`general.alignment of ${JSON.stringify(alignment)}`);
}

/** What all tensors of a file add up to. */
interface TensorTotals {
  bytes: number;
  surplusBytes: number;
  /** Highest N of the names `blk.N.…`, or -1. */
  highestBlock: number;
  /** Rows of the token embedding, or null. */
  vocabTokens: number | null;
}

/** Reads the tensor list; as in ggml, each must start where the one before it ended, padded. */
function readGgufTensors(cursor: GgufCursor, count: number, alignment: number): TensorTotals {
  const totals: TensorTotals = { bytes: 0, surplusBytes: 0, highestBlock: -1, vocabTokens: null };
  const seen = new Set<string>();
  let [expectedOffset, dataBytes, lastName] = [0, 0, ""];
  for (let index = 0; index < count; index++) {
    const { name, bytes, offset, rows } = readGgufTensor(cursor, seen);
    if (offset !== expectedOffset) {
      const found = `tensor "${name}" with data at ${offset}, not ${expectedOffset},`;
      throw cursor.refuse(found, cursor.offset - 8);
    }
    [expectedOffset, dataBytes, lastName] = [
      offset + padTo(bytes, alignment),
      offset + bytes,
      name,
    ];
    totals.bytes += bytes;
    const block = /^blk\.(\d+)\./.exec(name)?.[1];
    if (block !== undefined) totals.highestBlock = Math.max(totals.highestBlock, Number(block));
    if (name === "token_embd.weight") totals.vocabTokens = rows;
  }
  const end = padTo(cursor.offset, alignment) + dataBytes;
  const surplusBytes = cursor.source.sizeBytes - end;
  if (surplusBytes >= 0 || count === 0) {
    return { ...totals, surplusBytes: surplusBytes < alignment ? 0 : surplusBytes };
  }
  throw cursor.refuse(
    `data up to ${end} (tensor "${lastName}"), past the end of the file at ` +
      `${cursor.source.sizeBytes}, named`,
  );
}

function readGgufTensor(
  cursor: GgufCursor,
  seen: Set<string>,
): { name: string; bytes: number; offset: number; rows: number } {
  const start = cursor.offset;
  const nameBytes = cursor.length("a tensor's name", 1);
  if (nameBytes === 0 || nameBytes >= GGUF_LIMITS.tensorNameBytes) {
    throw cursor.refuse(`a tensor's name of ${nameBytes} bytes`, start);
  }
  const name = cursor.text(nameBytes, "a tensor's name");
  if (seen.has(name)) throw cursor.refuse(`the tensor "${name}" a second time`, start);
  seen.add(name);
  const dimensionCount = cursor.u32(`the dimensions of "${name}"`);
  if (dimensionCount > GGUF_LIMITS.dimensions) {
    throw cursor.refuse(`tensor "${name}" with ${dimensionCount} dimensions`, cursor.offset - 4);
  }
  const sizes: number[] = [];
  for (let index = 0; index < dimensionCount; index++) {
    const size = cursor.u64(`a dimension of "${name}"`);
    if (size === 0) {
      throw cursor.refuse(`tensor "${name}" with a dimension of 0`, cursor.offset - 8);
    }
    sizes.push(size);
  }
  const bytes = readTensorBytes(cursor, name, sizes);
  return { name, bytes, offset: cursor.u64(`the offset of "${name}"`), rows: sizes[1] ?? 1 };
}

function readTensorBytes(cursor: GgufCursor, name: string, sizes: readonly number[]): number {
  const type = cursor.u32(`the type of "${name}"`);
  const format = TENSOR_TYPES[type];
  if (format === undefined) {
    throw cursor.refuse(`tensor "${name}" of type ${type}`, cursor.offset - 4);
  }
  const [typeName, blockElements, blockBytes] = format;
  if ((sizes[0] ?? 1) % blockElements !== 0) {
    throw cursor.refuse(
      `tensor "${name}" with rows of ${sizes[0]}, no multiple of the block of ${typeName},`,
    );
  }
  const bytes = sizes.reduce((product, size) => product * size, 1) / blockElements * blockBytes;
  if (bytes <= cursor.source.sizeBytes) return bytes;
  throw cursor.refuse(`tensor "${name}" of ${bytes} bytes, more than the file holds,`);
}

/** A tensor of a layer that the metadata does not count means that one of the two is damaged. */
function checkBlocks(
  cursor: GgufCursor,
  values: ReadonlyMap<string, HeaderValue>,
  highestBlock: number,
): void {
  const blocks = values.get(`${values.get("general.architecture")}.block_count`);
  if (typeof blocks !== "number" || highestBlock < blocks) return;
  throw cursor.refuse(`tensors of block ${highestBlock}, but block_count ${blocks}`);
}

/**
 * Names all files of a sharded model.
 *
 * @param path Path of any of them, or of a file that stands alone.
 * @returns All paths in order; only `path` itself when its name is no shard's.
 *
 * @example
 * ```ts
 * import { assertEquals } from "@std/assert";
 * assertEquals(listShards("m-00002-of-00002.gguf"), ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]);
 * ```
 */
export function listShards(path: string): string[] {
  const match = /^(.*)-(\d{5})-of-(\d{5})\.gguf$/s.exec(path);
  const count = Number(match?.[3] ?? 0);
  if (match === null || count < 1) return [path];
  const number = (value: number) => String(value).padStart(5, "0");
  return Array.from(
    { length: count },
    (_, index) => `${match[1]}-${number(index + 1)}-of-${number(count)}.gguf`,
  );
}

/**
 * Turns a Hugging Face config.json into a header with GGUF's key names, so that one model of memory
 * serves both.
 *
 * Source: config classes of transformers 4.57 and the conversion of llama.cpp, 2026-09.
 *
 * @param text The file's text.
 * @param path Its path, for messages.
 * @returns The header; numbers that the file does not state are left out.
 * @throws RefusedError when it is no JSON object.
 */
export function parseHfConfig(text: string, path: string): ModelHeader {
  const root = parseObjectText(text, path);
  const nested = root["text_config"];
  const config = isRecord(nested) ? { ...root, ...nested } : root;
  const modelType = typeof config["model_type"] === "string" ? config["model_type"] : "unknown";
  const architecture = HF_ARCHITECTURES.get(modelType) ?? modelType;
  const values = new Map<string, HeaderValue>([["general.architecture", architecture]]);
  const entries = { ...readHfSizes(config), ...readHfLayers(config), ...readHfMla(config) };
  for (const [key, value] of Object.entries(entries)) {
    if (value !== undefined) values.set(`${architecture}.${key}`, value);
  }
  return { values, vocabTokens: findNumber(config, "vocab_size") ?? null };
}

type HfEntries = Record<string, number | readonly number[] | undefined>;

/** The first of the names that holds a number. */
function findNumber(config: Record<string, unknown>, ...names: string[]): number | undefined {
  for (const name of names) {
    const value = config[name];
    if (typeof value === "number") return value;
  }
  return undefined;
}

function readHfSizes(config: Record<string, unknown>): HfEntries {
  const hidden = findNumber(config, "hidden_size") ?? 0;
  const product = (a: string, b: string): number | undefined => {
    const [left, right] = [findNumber(config, a), findNumber(config, b)];
    return left === undefined || right === undefined ? undefined : left * right;
  };
  const expand = findNumber(config, "mamba_expand", "expand");
  const usesWindow = config["use_sliding_window"] !== false;
  const shortConv = findNumber(config, "conv_L_cache");
  return {
    "block_count": findNumber(config, "num_hidden_layers"),
    "context_length": findNumber(config, "max_position_embeddings"),
    "embedding_length": findNumber(config, "hidden_size"),
    "attention.head_count": findNumber(config, "num_attention_heads"),
    "attention.head_count_kv": findNumber(config, "num_key_value_heads", "num_attention_heads"),
    "attention.key_length": findNumber(config, "head_dim", "attention_head_dim"),
    "attention.value_length": findNumber(config, "v_head_dim", "head_dim", "attention_head_dim"),
    "attention.sliding_window": usesWindow ? findNumber(config, "sliding_window") : 0,
    "attention.sliding_window_pattern": findNumber(config, "sliding_window_pattern"),
    "attention.shared_kv_layers": findNumber(config, "num_kv_shared_layers"),
    "attention.indexer.top_k": findNumber(config, "index_topk"),
    "full_attention_interval": findNumber(config, "full_attention_interval"),
    "shortconv.l_cache": shortConv,
    "ssm.conv_kernel": findNumber(config, "mamba_d_conv", "linear_conv_kernel_dim", "conv_kernel"),
    "ssm.state_size": findNumber(
      config,
      "mamba_d_state",
      "linear_key_head_dim",
      "ssm_state_size",
      "state_size",
    ),
    "ssm.group_count": findNumber(config, "mamba_n_groups", "linear_num_key_heads", "n_groups"),
    "ssm.inner_size": findNumber(config, "mamba_d_ssm") ??
      product("linear_num_value_heads", "linear_value_head_dim") ??
      product("mamba_num_heads", "mamba_head_dim") ??
      (expand === undefined ? undefined : expand * hidden),
  };
}

/** Which layers slide or keep a recurrent state, from the several ways of saying it. */
function readHfLayers(config: Record<string, unknown>): HfEntries {
  const kinds = listHfLayerKinds(config);
  if (kinds === null) return {};
  const kvHeads = findNumber(config, "num_key_value_heads", "num_attention_heads") ?? 0;
  const attends = (kind: string) => kind.includes("attention") && kind !== "linear_attention";
  const entries: HfEntries = {};
  if (kinds.some((kind) => kind === "sliding_attention" || kind === "chunked_attention")) {
    entries["attention.sliding_window_pattern"] = kinds.map((kind) =>
      kind === "sliding_attention" || kind === "chunked_attention" ? 1 : 0
    );
  }
  if (kinds.some((kind) => !attends(kind))) {
    entries["attention.head_count_kv"] = kinds.map((kind) => attends(kind) ? kvHeads : 0);
    entries["feed_forward_length"] = kinds.map((kind) => kind === "mlp" ? 1 : 0);
  }
  return entries;
}

function listHfLayerKinds(config: Record<string, unknown>): string[] | null {
  const listed = config["layer_types"] ?? config["layers_block_type"];
  if (Array.isArray(listed)) return listed.map((kind) => kind === "full" ? "attention" : `${kind}`);
  const letters = config["hybrid_override_pattern"];
  if (typeof letters === "string") {
    return [...letters].map((letter) => {
      if (letter === "*") return "attention";
      return letter === "M" ? "mamba" : "mlp";
    });
  }
  const [period, offset] = [
    findNumber(config, "attn_layer_period"),
    findNumber(config, "attn_layer_offset"),
  ];
  const layers = findNumber(config, "num_hidden_layers");
  if (!period || offset === undefined || layers === undefined) return null;
  const length = Math.min(Math.max(0, layers), GGUF_LIMITS.layers);
  return Array.from({ length }, (_, i) => i % period === offset ? "attention" : "mamba");
}

/** DeepSeek's latent attention: one vector a layer, the latent and the rotated part. */
function readHfMla(config: Record<string, unknown>): HfEntries {
  const latent = findNumber(config, "kv_lora_rank");
  const rope = findNumber(config, "qk_rope_head_dim");
  if (latent === undefined || rope === undefined) return {};
  return {
    "attention.head_count_kv": 1,
    "attention.key_length": latent + rope,
    "attention.value_length": latent,
    "attention.key_length_mla": (findNumber(config, "qk_nope_head_dim") ?? 0) + rope,
    "attention.value_length_mla": findNumber(config, "v_head_dim") ?? 0,
  };
}

/**
 * Adds up the tensors of a safetensors file from its header.
 *
 * Source of the format: safetensors' README, 0.6, checked 2026-09.
 *
 * @param source The file.
 * @param path Its path, for messages.
 * @returns Bytes of all tensors.
 * @throws RefusedError when the header is damaged or the file does not end with the last tensor.
 */
export function readSafetensorsBytes(source: ByteSource, path: string): number {
  const refuse = (found: string) =>
    refusal(`Cannot read safetensors file "${path}": ${found}`, DAMAGED_HINT);
  const head = new Uint8Array(8);
  if (source.readAt(0, head) < 8) throw refuse("the file ends inside the header's length");
  const headerBytes = Number(new DataView(head.buffer).getBigUint64(0, true));
  if (headerBytes > SAFETENSORS_HEADER_BYTES || headerBytes + 8 > source.sizeBytes) {
    throw refuse(`a header of ${headerBytes} bytes in a file of ${source.sizeBytes}`);
  }
  const text = new Uint8Array(headerBytes);
  if (source.readAt(8, text) < headerBytes) throw refuse("the file ends inside the header");
  const spans = listTensorSpans(parseObjectText(new TextDecoder().decode(text), path), refuse);
  let end = 0;
  for (const [from, to] of spans.sort((a, b) => a[0] - b[0] || a[1] - b[1])) {
    if (from !== end || to < from) throw refuse(`a tensor from ${from} to ${to}, not from ${end}`);
    end = to;
  }
  if (8 + headerBytes + end !== source.sizeBytes) {
    throw refuse(`data up to ${8 + headerBytes + end} in a file of ${source.sizeBytes} bytes`);
  }
  return end;
}

function listTensorSpans(
  header: Record<string, unknown>,
  refuse: (found: string) => RefusedError,
): [number, number][] {
  return Object.entries(header).filter(([name]) => name !== "__metadata__").map(
    ([name, tensor]) => {
      const offsets = isRecord(tensor) ? tensor["data_offsets"] : undefined;
      const [from, to] = Array.isArray(offsets) ? offsets : [];
      if (Number.isSafeInteger(from) && Number.isSafeInteger(to)) return [from, to];
      throw refuse(`tensor "${name}" has no data_offsets`);
    },
  );
}

/**
 * Finds the manifest that an ollama model's name stands for.
 *
 * Source: ollama's types/model/name.go, 2026-09: `[[host/]namespace/]model[:tag]`.
 *
 * @param name The name as given to `ollama run`.
 * @returns The manifest's path below the models folder, or null when this can be no such name.
 *
 * @example
 * ```ts
 * import { assertEquals } from "@std/assert";
 * assertEquals(parseOllamaName("qwen3:8b"), "manifests/registry.ollama.ai/library/qwen3/8b");
 * ```
 */
export function parseOllamaName(name: string): string | null {
  const colon = name.lastIndexOf(":");
  const hasTag = colon > name.lastIndexOf("/");
  const tag = hasTag ? name.slice(colon + 1) : "latest";
  const parts = (hasTag ? name.slice(0, colon) : name).split("/");
  const defaults = ["registry.ollama.ai", "library"];
  const full = [...defaults.slice(0, Math.max(0, 3 - parts.length)), ...parts, tag];
  // No part may climb out of the folder or hide a separator; a host may have a port.
  const isSafe = full.length === 4 &&
    full.every((part, index) => (index === 0 ? /^\w[\w.-]*(:\d+)?$/ : /^\w[\w.-]*$/).test(part));
  return isSafe ? ["manifests", ...full].join("/") : null;
}

/** Files that an ollama manifest names, as paths below the models folder. */
export interface OllamaManifest {
  /** The model's blob. */
  model: string;
  /** Blobs of its projectors. */
  projectors: string[];
}

/**
 * Reads an ollama manifest.
 *
 * @param text The manifest's JSON.
 * @param path Its path, for messages.
 * @returns Paths of the blobs below the models folder.
 * @throws RefusedError when it names no model.
 */
export function parseOllamaManifest(text: string, path: string): OllamaManifest {
  const layers = parseObjectText(text, path)["layers"];
  const blobs = (kind: string): string[] =>
    (Array.isArray(layers) ? layers : []).flatMap((layer: unknown) => {
      if (!isRecord(layer) || layer["mediaType"] !== `application/vnd.ollama.image.${kind}`) {
        return [];
      }
      const digest = /^sha256:([0-9a-f]{64})$/.exec(String(layer["digest"]));
      return digest === null ? [] : [`blobs/sha256-${digest[1]}`];
    });
  const models = blobs("model");
  const model = models[0];
  if (model === undefined || models.length > 1) {
    throw refusal(`Cannot read ollama manifest "${path}": ${models.length} model files`);
  }
  return { model, projectors: blobs("projector") };
}

/**
 * Reads a number of tokens from text.
 *
 * @param text Decimal digits, blanks around them allowed.
 * @param name What the text is called in the message.
 * @returns Tokens, at least 1.
 * @throws RefusedError when it is not a whole number above 0.
 *
 * @example
 * ```ts
 * import { assertEquals } from "@std/assert";
 * assertEquals(parseTokenCount("131072", "AUTOMATON_CONTEXT_TOKENS"), 131072);
 * ```
 */
export function parseTokenCount(text: string, name: string): number {
  const tokens = /^\s*\d+\s*$/.test(text) ? Number(text) : NaN;
  if (Number.isSafeInteger(tokens) && tokens > 0) return tokens;
  throw refusal(
    `Cannot use ${name} "${text}": not a whole number of tokens above 0`,
    `unset ${name}`,
  );
}

function parseObjectText(text: string, path: string): Record<string, unknown> {
  let root: unknown;
  try {
    root = parseJsonText(text, path);
  } catch (error) {
    throw refusal(error instanceof Error ? error.message : String(error));
  }
  if (isRecord(root)) return root;
  throw refusal(`Cannot use "${path}": found ${describeValue(root)}, wanted an object`);
}

/** Splits what LINUX_FACTS_SCRIPT printed into files: path → text without blanks at its ends. */
export function parseLinuxFacts(text: string): Map<string, string> {
  const files = new Map<string, string>();
  for (const part of text.split(/^==> /m).slice(1)) {
    const end = part.indexOf("\n");
    files.set(part.slice(0, end), part.slice(end + 1).trim());
  }
  return files;
}

/** A whole number of bytes; null for anything else. */
function parseByteCount(text: string | undefined): number | null {
  return text !== undefined && /^\d{1,19}$/.test(text) ? Number(text) : null;
}

/** Memory of the machine itself, as `/proc/meminfo` and control groups tell. */
export interface HostMemory {
  /** All it has. */
  totalBytes: number;
  /** What a new program may use, or null when unknown. */
  availableBytes: number | null;
  /** Why `availableBytes` is null. */
  unknownReason: string | null;
  /** What a reader should know, or null. */
  note: string | null;
}

/**
 * The machine's memory on Linux: what the kernel calls available, cut to what the control groups
 * above this process leave (v1 and v2; their page cache that can be dropped does not count as used).
 *
 * Source: kernel documentation of meminfo, cgroup-v1/memory and cgroup-v2, 6.x.
 *
 * @param files Paths and texts from parseLinuxFacts().
 * @returns The memory, or null when there is no meminfo.
 */
export function parseHostMemory(files: ReadonlyMap<string, string>): HostMemory | null {
  const meminfo = files.get("/proc/meminfo");
  if (meminfo === undefined) return null;
  const field = (name: string): number | null => {
    const kib = new RegExp(`^${name}:\\s+(\\d+) kB$`, "m").exec(meminfo)?.[1];
    return kib === undefined ? null : Number(kib) * KIB;
  };
  const totalBytes = field("MemTotal") ?? 0;
  const available = field("MemAvailable");
  if (available === null) {
    const unknownReason = "/proc/meminfo has no MemAvailable";
    return { totalBytes, availableBytes: null, unknownReason, note: null };
  }
  const groups = listCgroupRoom(files);
  const smallest = groups.toSorted((a, b) => a.roomBytes - b.roomBytes)[0];
  if (smallest === undefined || smallest.roomBytes >= available) {
    return { totalBytes, availableBytes: available, unknownReason: null, note: null };
  }
  return {
    totalBytes: Math.min(totalBytes, smallest.limitBytes),
    availableBytes: Math.max(0, smallest.roomBytes),
    unknownReason: null,
    note: `limited by control group ${smallest.path}`,
  };
}

interface CgroupRoom {
  path: string;
  limitBytes: number;
  roomBytes: number;
}

/** Names of the three files in both versions, and of the cache that can be dropped. */
const CGROUP_FILES = [
  { limit: "memory.max", used: "memory.current", cache: "inactive_file" },
  {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cache: "total_inactive_file",
  },
] as const;

function listCgroupRoom(files: ReadonlyMap<string, string>): CgroupRoom[] {
  const rooms: CgroupRoom[] = [];
  for (const { limit, used, cache } of CGROUP_FILES) {
    for (const [path, text] of files) {
      if (!path.endsWith(`/${limit}`)) continue;
      const folder = path.slice(0, -limit.length - 1);
      const limitBytes = parseByteCount(text);
      const usedBytes = parseByteCount(files.get(`${folder}/${used}`));
      // "max" in version 2, an enormous number in version 1: no limit.
      if (limitBytes === null || limitBytes >= CGROUP_NO_LIMIT_BYTES || usedBytes === null) {
        continue;
      }
      const stat = files.get(`${folder}/memory.stat`) ?? "";
      const cached = Number(new RegExp(`^${cache} (\\d+)$`, "m").exec(stat)?.[1] ?? 0);
      rooms.push({ path: folder, limitBytes, roomBytes: limitBytes - (usedBytes - cached) });
    }
  }
  return rooms;
}

function newProbe(
  probe: string,
  state: ProbeReport["state"],
  reason: string | null,
  devices: DeviceReport[] = [],
): ProbeReport {
  return { probe, state, reason, devices };
}

/**
 * Total and free memory of a device. Free memory that is no part of the total is unknown.
 *
 * @param why The reason where it is unknown.
 */
function readingOf(
  total: number | null,
  free: number | null,
  why: string,
): Pick<DeviceReport, "total_bytes" | "free_bytes" | "unknown_reason" | "note"> {
  const isKnown = total !== null && free !== null && free >= 0 && free <= total;
  return {
    total_bytes: total,
    free_bytes: isKnown ? free : null,
    unknown_reason: isKnown ? null : why,
    note: null,
  };
}

/** Why a program's output is of no use, in its own words; null when it exited well. */
function describeProbeFailure(output: ProbeOutput): string | null {
  switch (output.end) {
    case "missing":
      return "is not installed";
    case "timeout":
      return `gave no answer within ${output.deadlineMs / 1000} s`;
    case "failed":
      return `could not be run: ${output.message}`;
    case "exited": {
      if (output.code === 0) return null;
      const words = firstLine(output.stdout) || firstLine(output.stderr) || "no words";
      return `exited with ${output.code}: ${words}`;
    }
  }
}

function firstLine(text: string): string {
  return text.split("\n").map((line) => line.trim()).find((line) => line !== "") ?? "";
}

/**
 * Reads NVIDIA cards from nvidia-smi.
 *
 * Source: nvidia-smi's manual and outputs in public reports, drivers 470 to 590.
 *
 * @param output What nvidia-smi printed for the query of this file, in MiB.
 * @param visible CUDA_VISIBLE_DEVICES, or null when it is not set.
 * @param host The machine's memory, for GPUs that share it; null when unknown.
 * @returns The cards; a card with a cell that is no number is unknown, not empty.
 */
export function parseNvidiaSmi(
  output: ProbeOutput,
  visible: string | null,
  host: HostMemory | null,
): ProbeReport {
  if (output.end === "missing") return newProbe("nvidia", "absent", "nvidia-smi is not installed");
  const words = output.end === "exited" ? `${output.stdout}\n${output.stderr}` : "";
  if (/^No devices were found/m.test(words)) {
    return newProbe("nvidia", "absent", "nvidia-smi: No devices were found");
  }
  const failure = describeProbeFailure(output);
  if (failure !== null || output.end !== "exited") {
    return newProbe("nvidia", "unknown", `nvidia-smi ${failure}`);
  }
  const rows = output.stdout.split("\n").map((line) => line.trim()).filter((line) => line !== "");
  const known = rows.flatMap((row) => parseNvidiaRow(row) ?? []);
  const odd = rows.find((row) => parseNvidiaRow(row) === null);
  if (odd !== undefined) {
    return newProbe("nvidia", "unknown", `nvidia-smi printed a line that is no card: ${odd}`);
  }
  const shown = selectVisible(known, visible, "CUDA_VISIBLE_DEVICES");
  if (typeof shown === "string") return newProbe("nvidia", "unknown", shown);
  if (shown.length === 0) {
    const reason = known.length === 0
      ? "nvidia-smi lists no card"
      : "CUDA_VISIBLE_DEVICES hides all";
    return newProbe("nvidia", "absent", reason);
  }
  return newProbe("nvidia", "found", null, shown.map((card) => describeNvidiaCard(card, host)));
}

interface NvidiaCard {
  index: string;
  uuid: string;
  name: string;
  total: string;
  free: string;
}

/** A row's cells from both ends, since a name may hold a comma; null when there are too few. */
function parseNvidiaRow(line: string): NvidiaCard | null {
  const cells = line.split(",").map((cell) => cell.trim());
  const [index, uuid] = cells;
  const [total, free] = cells.slice(-2);
  if (cells.length < 5 || !/^\d+$/.test(index ?? "") || !uuid || !total || !free) return null;
  return { index: index ?? "", uuid, name: cells.slice(2, -2).join(", "), total, free };
}

function describeNvidiaCard(card: NvidiaCard, host: HostMemory | null): DeviceReport {
  const identity = { id: card.uuid, name: card.name };
  if (NVIDIA_UNIFIED.test(card.name)) {
    return {
      ...identity,
      kind: "integrated",
      ...readingOf(host?.totalBytes ?? null, host?.availableBytes ?? null, HOST_UNKNOWN),
      note: "shares the machine's memory",
    };
  }
  const toBytes = (mib: number | null) => mib === null ? null : mib * MIB;
  const total = toBytes(parseByteCount(card.total));
  const free = toBytes(parseByteCount(card.free));
  const why = `nvidia-smi says memory.total ${card.total}, memory.free ${card.free}`;
  return { ...identity, kind: "discrete", ...readingOf(total, free, why) };
}

/**
 * Keeps the cards that a variable lists, by index or by the start of a uuid; like CUDA, an entry
 * that means no card ends the list. Returns a reason instead when a MIG slice is listed.
 */
function selectVisible<T extends { index: string; uuid: string }>(
  cards: readonly T[],
  visible: string | null,
  variable: string,
): T[] | string {
  if (visible === null) return [...cards];
  const shown: T[] = [];
  for (const entry of visible.split(",").map((part) => part.trim())) {
    if (entry.startsWith("MIG-")) return `${variable} lists a MIG slice, whose memory is not known`;
    const card = cards.find(({ index, uuid }) =>
      index === entry || (entry.length > 3 && uuid.startsWith(entry))
    );
    if (card === undefined || shown.includes(card)) break;
    shown.push(card);
  }
  return shown;
}

/** Numbers and texts of one graphics card below /sys/class/drm. */
interface DrmCard {
  index: string;
  uuid: string;
  read(name: string): string | undefined;
  bytes(name: string): number | null;
  names: string[];
}

function listDrmCards(files: ReadonlyMap<string, string>, vendor: string): DrmCard[] {
  const cards: DrmCard[] = [];
  for (const [path, text] of files) {
    const match = /^(\/sys\/class\/drm\/card(\d+))\/device\/vendor$/.exec(path);
    if (match === null || text !== vendor) continue;
    const root = `${match[1]}/`;
    cards.push({
      index: `${cards.length}`,
      uuid: `card${match[2]}`,
      read: (name) => files.get(root + name),
      bytes: (name) => parseByteCount(files.get(root + name)),
      names: [...files.keys()].filter((key) => key.startsWith(root)),
    });
  }
  return cards;
}

function nameDrmCard(card: DrmCard, vendor: string): string {
  const id = /^PCI_ID=(\S+)$/m.exec(card.read("device/uevent") ?? "")?.[1];
  return id === undefined ? `${vendor} ${card.uuid}` : `${vendor} ${card.uuid} (${id})`;
}

/**
 * Reads AMD cards from sysfs.
 *
 * Source: the kernel's amdgpu documentation (mem_info_*), 6.x; the rule for APUs after llama.cpp
 * and ollama reports of machines with a small carve-out, 2026.
 *
 * @param files Paths and texts from parseLinuxFacts().
 * @param visible HIP_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES, or null when neither is set.
 * @param host The machine's memory, for APUs; null when unknown.
 * @returns The cards; unknown when a card shows no memory (then rocm-smi may know).
 */
export function parseAmdSysfs(
  files: ReadonlyMap<string, string>,
  visible: string | null,
  host: HostMemory | null,
): ProbeReport {
  const cards = listDrmCards(files, "0x1002");
  if (cards.length === 0) return newProbe("amd", "absent", "no AMD card in /sys/class/drm");
  const shown = selectVisible(cards, visible, "HIP_VISIBLE_DEVICES");
  if (typeof shown === "string") return newProbe("amd", "unknown", shown);
  if (shown.length === 0) return newProbe("amd", "absent", "HIP_VISIBLE_DEVICES hides all");
  const devices = shown.map((card) => describeAmdCard(card, host));
  const isKnown = devices.some((device) => device.free_bytes !== null);
  const reason = "amdgpu shows no memory of the card in /sys/class/drm";
  return newProbe("amd", isKnown ? "found" : "unknown", isKnown ? null : reason, devices);
}

function describeAmdCard(card: DrmCard, host: HostMemory | null): DeviceReport {
  const identity = { id: card.uuid, name: nameDrmCard(card, "AMD") };
  const vram = card.bytes("device/mem_info_vram_total");
  const used = card.bytes("device/mem_info_vram_used");
  const gtt = card.bytes("device/mem_info_gtt_total") ?? 0;
  const gttUsed = card.bytes("device/mem_info_gtt_used") ?? 0;
  const vramFree = vram === null || used === null ? null : vram - used;
  const isApu = vram !== null && vram <= APU_MAX_VRAM_BYTES && gtt >= APU_MIN_GTT_BYTES &&
    gtt >= APU_MIN_GTT_RATIO * vram;
  if (!isApu || vramFree === null || vramFree < 0) {
    const why = `mem_info_vram_total ${vram}, mem_info_vram_used ${used}`;
    return { ...identity, kind: "discrete", ...readingOf(vram, vramFree, why) };
  }
  const available = host?.availableBytes ?? null;
  const pool = vramFree + Math.max(0, gtt - gttUsed);
  const free = available === null ? null : Math.min(pool, available + vramFree);
  return {
    ...identity,
    kind: "integrated",
    ...readingOf(vram + gtt, free, HOST_UNKNOWN),
    note: "shares the machine's memory beyond its own carve-out",
  };
}

/**
 * Reads AMD cards from `rocm-smi --showmeminfo vram --json`.
 *
 * Source: rocm-smi 5 to 7; its numbers are texts, warnings may come before the JSON.
 *
 * @param output What rocm-smi printed.
 * @param visible HIP_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES, or null when neither is set.
 * @returns The cards.
 */
export function parseRocmSmi(output: ProbeOutput, visible: string | null): ProbeReport {
  if (output.end === "missing") return newProbe("amd", "absent", "rocm-smi is not installed");
  const failure = describeProbeFailure(output);
  if (failure !== null || output.end !== "exited") {
    return newProbe("amd", "unknown", `rocm-smi ${failure}`);
  }
  const line = output.stdout.split("\n").find((text) => text.trimStart().startsWith("{"));
  let cards: unknown;
  try {
    cards = JSON.parse(line ?? "");
  } catch {
    return newProbe("amd", "unknown", `rocm-smi printed no JSON: ${firstLine(output.stdout)}`);
  }
  const listed = Object.entries(isRecord(cards) ? cards : {})
    .filter(([id]) => /^card\d+$/.test(id))
    .map(([id, fields], index) => ({ index: `${index}`, uuid: id, fields }));
  if (listed.length === 0) return newProbe("amd", "unknown", "rocm-smi lists no card");
  const shown = selectVisible(listed, visible, "HIP_VISIBLE_DEVICES");
  if (typeof shown === "string") return newProbe("amd", "unknown", shown);
  if (shown.length === 0) return newProbe("amd", "absent", "HIP_VISIBLE_DEVICES hides all");
  const devices = shown.map(({ uuid, fields }) =>
    describeRocmCard(uuid, isRecord(fields) ? fields : {})
  );
  return newProbe("amd", "found", null, devices);
}

function describeRocmCard(id: string, fields: Record<string, unknown>): DeviceReport {
  const total = parseByteCount(`${fields["VRAM Total Memory (B)"]}`);
  const used = parseByteCount(`${fields["VRAM Total Used Memory (B)"]}`);
  const free = total === null || used === null ? null : total - used;
  const why = `rocm-smi says total ${total}, used ${used}`;
  return { id, name: `AMD ${id}`, kind: "discrete", ...readingOf(total, free, why) };
}

/**
 * Reads Intel cards with memory of their own from sysfs. i915 may tell what is free, xe only tells
 * how much there is: then free memory is unknown. Integrated GPUs are left out.
 *
 * Source: i915's and xe's sysfs files (lmem_*_bytes, tile*\/physical_vram_size_bytes), kernel 6.x.
 *
 * @param files Paths and texts from parseLinuxFacts().
 * @returns The cards.
 */
export function parseIntelSysfs(files: ReadonlyMap<string, string>): ProbeReport {
  const devices: DeviceReport[] = [];
  for (const card of listDrmCards(files, "0x8086")) {
    const tiles = card.names.filter((name) => name.endsWith("/physical_vram_size_bytes"));
    const lmem = card.bytes("lmem_total_bytes") ?? card.bytes("device/lmem_total_bytes");
    const tileBytes = sumOf(tiles, (name) => parseByteCount(files.get(name)) ?? 0);
    const total = lmem ?? tileBytes;
    if (total === 0) continue;
    const free = card.bytes("lmem_avail_bytes") ?? card.bytes("device/lmem_avail_bytes");
    devices.push({
      id: card.uuid,
      name: nameDrmCard(card, "Intel"),
      kind: "discrete",
      ...readingOf(total, free, "the driver does not tell how much of it is free"),
    });
  }
  if (devices.length > 0) return newProbe("intel", "found", null, devices);
  return newProbe("intel", "absent", "no Intel card with memory of its own in /sys/class/drm");
}

/**
 * Reads the memory that a Mac's GPU may use from `sysctl -n hw.memsize iogpu.wired_limit_mb`.
 *
 * Source: llama.cpp and MLX discussions of recommendedMaxWorkingSetSize, 2025; a limit of 0 means
 * the system's default, of which only an estimate is possible.
 *
 * @param output What sysctl printed: bytes, then MiB.
 * @returns One integrated device.
 */
export function parseAppleSysctl(output: ProbeOutput): ProbeReport {
  const failure = describeProbeFailure(output);
  if (output.end !== "exited") return newProbe("apple", "unknown", `sysctl ${failure}`);
  const [memory, limit] = output.stdout.trim().split(/\s+/).map((text) => parseByteCount(text));
  // A Mac without the second number (no Apple GPU) makes sysctl exit with 1 after the first.
  if (memory === undefined || memory === null || memory === 0) {
    return newProbe("apple", "unknown", `sysctl ${failure ?? "printed no hw.memsize"}`);
  }
  if (limit === undefined || limit === null) {
    return newProbe("apple", "absent", "this Mac has no iogpu.wired_limit_mb");
  }
  const isDefault = limit === 0;
  const share = memory <= APPLE_SMALL_BYTES ? APPLE_SMALL_SHARE : APPLE_LARGE_SHARE;
  const usable = isDefault ? Math.floor(memory * share) : Math.min(limit * MIB, memory);
  return newProbe("apple", "found", null, [{
    id: "apple",
    name: "Apple GPU",
    kind: "integrated",
    ...readingOf(usable, usable, ""),
    note: isDefault
      ? "an estimate of the system's default limit; memory in use by others is not known"
      : "the limit set in iogpu.wired_limit_mb; memory in use by others is not known",
  }]);
}

/**
 * Reads cards from the Windows registry: `reg query … /s /v HardwareInformation.qwMemorySize`. It
 * tells how much memory there is, not how much is free. AdapterRAM, 32 bits wide, is never used.
 *
 * Source: Windows' display class key, 10 and 11.
 *
 * @param output What reg printed.
 * @returns The cards, their free memory unknown.
 */
export function parseWindowsRegistry(output: ProbeOutput): ProbeReport {
  if (output.end !== "exited") {
    return newProbe("windows", "unknown", `reg ${describeProbeFailure(output)}`);
  }
  const devices: DeviceReport[] = [];
  let key = "";
  for (const line of output.stdout.split(/\r?\n/)) {
    if (line.startsWith("HKEY_")) key = line.trim();
    const hex = /qwMemorySize\s+REG_QWORD\s+0x([0-9a-f]{1,13})\s*$/i.exec(line)?.[1];
    if (hex === undefined || parseInt(hex, 16) === 0) continue;
    const id = key.slice(key.lastIndexOf("\\") + 1);
    devices.push({
      id,
      name: `display adapter ${id}`,
      kind: "discrete",
      ...readingOf(parseInt(hex, 16), null, "the registry does not tell how much of it is free"),
    });
  }
  // reg exits with 1 when it finds no such value.
  if (devices.length === 0) return newProbe("windows", "absent", "no qwMemorySize in the registry");
  return newProbe("windows", "found", null, devices);
}

/** Reads `FreePhysicalMemory TotalVisibleMemorySize` of Windows, both in KiB. */
export function parseWindowsMemory(output: ProbeOutput): HostMemory | null {
  if (output.end !== "exited" || output.code !== 0) return null;
  const [free, total] = output.stdout.trim().split(/\s+/).map((text) => parseByteCount(text));
  if (typeof free !== "number" || typeof total !== "number") return null;
  return { totalBytes: total * KIB, availableBytes: free * KIB, unknownReason: null, note: null };
}

/** The machine's own memory as a device. */
function describeHost(host: HostMemory | null): ProbeReport {
  if (host === null) return newProbe("cpu", "unknown", "the machine's memory could not be read");
  return newProbe("cpu", "found", null, [{
    id: "cpu",
    name: "the machine's memory",
    kind: "cpu",
    total_bytes: host.totalBytes,
    free_bytes: host.availableBytes,
    unknown_reason: host.unknownReason,
    note: host.note,
  }]);
}

/** An NVIDIA driver is loaded or a card is there, but nvidia-smi is not: unknown, not absent. */
function explainMissingSmi(report: ProbeReport, files: ReadonlyMap<string, string>): ProbeReport {
  const isThere = files.has("/proc/driver/nvidia/version") ||
    listDrmCards(files, "0x10de").length > 0;
  if (report.state !== "absent" || report.reason !== "nvidia-smi is not installed" || !isThere) {
    return report;
  }
  return newProbe("nvidia", "unknown", "there is an NVIDIA card, but nvidia-smi is not installed");
}

function formatMib(bytes: number): string {
  return `${(bytes / MIB).toFixed(2)} MiB`;
}

/** A row of a table: label, value, remark. */
type TableRow = readonly [label: string, value: string, remark?: string];

/** Lays out rows in columns: the last column of numbers ends flush right. */
function renderRows(rows: readonly TableRow[]): string {
  const width = (column: 0 | 1) => Math.max(...rows.map((row) => row[column].length));
  const [first, second] = [width(0), width(1)];
  return rows.map(([label, value, remark]) =>
    `  ${label.padEnd(first)}  ${value.padStart(second)}${remark ? `  ${remark}` : ""}`.trimEnd()
  ).join("\n");
}

/**
 * The derivation as a table for people.
 *
 * @param report A finished report.
 * @param raises What would raise the answer, one line each.
 * @returns Several lines, without a final newline.
 */
export function renderExplanation(report: DetectReport, raises: readonly string[]): string {
  const parts = [
    `Model\n${renderRows(listModelRows(report))}`,
    ...(report.devices.length > 0 ? [`Devices\n${renderRows(listDeviceRows(report))}`] : []),
    ...(report.memory === null ? [] : [`Memory\n${renderRows(listMemoryRows(report))}`]),
    ...(report.budget === null ? [] : [`Budget\n${renderRows(listBudgetRows(report))}`]),
    `Answer\n${renderRows(listAnswerRows(report))}`,
    ...(raises.length > 0 ? [`What would raise it\n  ${raises.join("\n  ")}`] : []),
    ...(report.warnings.length > 0 ? [`Warnings\n  ${report.warnings.join("\n  ")}`] : []),
  ];
  return parts.join("\n\n");
}

function listModelRows(report: DetectReport): TableRow[] {
  const fields = Object.entries({ name: "none", ...report.model });
  const values = fields.map(([, value]) => value === null ? "unknown" : `${value}`);
  // Texts, unlike amounts, stand flush left.
  const width = Math.max(...values.map((value) => value.length));
  return fields.map(([key], index) => [
    key.replaceAll("_", " "),
    (values[index] ?? "").padEnd(width),
  ]);
}

function listDeviceRows(report: DetectReport): TableRow[] {
  return report.devices.map((device) => {
    const total = device.total_bytes === null ? "" : `of ${formatMib(device.total_bytes)}`;
    if (device.free_bytes === null) return [device.name, "unknown", device.unknown_reason ?? ""];
    const note = device.note === null ? "" : ` (${device.note})`;
    return [device.name, formatMib(device.free_bytes), `free ${total}, ${device.kind}${note}`];
  });
}

/** The terms of the derivation in words; those of a token are not MiB but bytes. */
const MEMORY_LABELS: Readonly<Record<string, string>> = {
  weights_bytes: "weights",
  projector_bytes: "projector",
  kv_bytes_per_token: "KV cache, each token",
  kv_swa_bytes: "KV cache, sliding window",
  recurrent_bytes: "recurrent state",
  compute_bytes: "compute buffer",
  compute_bytes_per_token: "compute buffer, each token",
};

function listMemoryRows(report: DetectReport): TableRow[] {
  return Object.entries(report.memory ?? {}).map(([key, bytes]) => [
    MEMORY_LABELS[key] ?? key,
    key.endsWith("_per_token") ? `${bytes} B` : formatMib(bytes),
  ]);
}

function listBudgetRows(report: DetectReport): TableRow[] {
  const budget = report.budget;
  if (budget === null) return [];
  const rows = budget.terms.map((term): TableRow => [
    term.device,
    formatMib(term.usable_bytes),
    `${formatMib(term.free_bytes)} free - ${formatMib(term.headroom_bytes)} headroom`,
  ]);
  return [...rows, ["all together", formatMib(budget.total_bytes), `pool: ${budget.pool}`]];
}

function listAnswerRows(report: DetectReport): TableRow[] {
  const { available_context_tokens: tokens, budget, memory_at_context: at } = report;
  const origin = budget === null
    ? `source: ${report.source}`
    : `exactly ${budget.exact_context_tokens}, limited by ${budget.limited_by}`;
  const rows: TableRow[] = [
    ["context", tokens === null ? "unknown" : `${tokens} tokens`, origin],
    [
      "fit for loops",
      report.loop_mode_eligible ? "yes" : "no",
      report.reason ?? `the floor is ${report.floor_tokens} tokens`,
    ],
  ];
  if (at === null) return rows;
  const terms = Object.entries({
    weights: at.weights_bytes,
    KV: at.kv_bytes,
    window: at.kv_swa_bytes,
    state: at.recurrent_bytes,
    compute: at.compute_bytes,
  }).map(([name, bytes]) => `${name} ${formatMib(bytes)}`);
  return [...rows, [`at ${at.context_tokens} tokens`, formatMib(at.total_bytes), terms.join(", ")]];
}

/**
 * What would raise the answer, with the figure that each change would give.
 *
 * @param model The model's shape and the bytes of its weights.
 * @param settings How it is run now.
 * @param budgetBytes What it may use.
 * @returns One line for each change that helps; none when the native context is reached.
 */
export function listRaises(
  model: { shape: ModelShape; weightsBytes: number },
  settings: CacheSettings,
  budgetBytes: number,
): string[] {
  const now = largestContext(model, settings, budgetBytes);
  if (now === model.shape.nativeTokens) {
    return [`nothing: ${now} tokens is the model's native context`];
  }
  const smaller = { ...model, weightsBytes: model.weightsBytes - GIB };
  const changes: [string, number][] = [
    ["--kv-type q8_0", tryContext(model, { ...settings, kvTypeK: "q8_0", kvTypeV: "q8_0" })],
    ["--kv-type q4_0", tryContext(model, { ...settings, kvTypeK: "q4_0", kvTypeV: "q4_0" })],
    ["--slots 1", tryContext(model, { ...settings, slots: 1 })],
    ["a model file 1 GiB smaller", model.weightsBytes > GIB ? tryContext(smaller, settings) : 0],
    ["1 GiB more free memory", largestContext(model, settings, budgetBytes + GIB)],
  ];
  return changes.filter(([, tokens]) => tokens > now).map(([change, tokens]) =>
    `${change}: ${roundContext(tokens)} tokens`
  );

  function tryContext(changed: typeof model, changedSettings: CacheSettings): number {
    try {
      checkCacheTypes(changed.shape, changedSettings);
    } catch {
      return 0; // The cache type does not suit this model's heads: no suggestion.
    }
    return largestContext(changed, changedSettings, budgetBytes);
  }
}

function roundContext(tokens: number): number {
  return Math.floor(tokens / CONTEXT_STEP_TOKENS) * CONTEXT_STEP_TOKENS;
}

// --- Input and output ---

function readModelText(path: string): string {
  try {
    return Deno.readTextFileSync(path);
  } catch (error) {
    throw refusal(`Cannot read "${path}": ${describeReadError(error)}`);
  }
}

function describeReadError(error: unknown): string {
  if (error instanceof Deno.errors.NotFound) return "no such file";
  return error instanceof Error ? error.message : String(error);
}

function isFilePath(path: string): boolean {
  try {
    return Deno.statSync(path).isFile;
  } catch {
    return false; // Missing or unreadable: whoever opens it says why.
  }
}

/** Opens a regular file for random access while `use` runs. */
function withByteSource<T>(path: string, use: (source: ByteSource) => T): T {
  let file: Deno.FsFile;
  let sizeBytes: number;
  try {
    // Looked at before it is opened: opening a named pipe would wait for a writer.
    const info = Deno.statSync(path);
    if (!info.isFile) throw new Error("not a regular file");
    sizeBytes = info.size;
    file = Deno.openSync(path);
  } catch (error) {
    throw refusal(`Cannot read model file "${path}": ${describeReadError(error)}`);
  }
  try {
    return use({ sizeBytes, readAt: (offset, into) => readFileAt(file, offset, into) });
  } finally {
    file.close();
  }
}

function readFileAt(file: Deno.FsFile, offset: number, into: Uint8Array): number {
  file.seekSync(offset, Deno.SeekMode.Start);
  let filled = 0;
  while (filled < into.length) {
    const count = file.readSync(into.subarray(filled));
    if (count === null) break;
    filled += count;
  }
  return filled;
}

function loadGgufModel(path: string, source: LoadedModel["source"]): LoadedModel {
  const paths = listShards(path);
  const shards = paths.map((shard) => withByteSource(shard, (bytes) => readGguf(bytes, shard)));
  const first = shards[0];
  if (first === undefined) throw refusal(`Cannot read GGUF file "${path}": no shards`);
  shards.forEach((shard, index) => {
    const [count, number] = [shard.values.get("split.count"), shard.values.get("split.no")];
    if ((count ?? paths.length) === paths.length && (number ?? index) === index) return;
    throw refusal(
      `Cannot read GGUF file "${paths[index]}": it says it is shard ${number} of ${count}, ` +
        `its name says ${index} of ${paths.length} (from 0)`,
    );
  });
  return {
    source,
    path,
    files: paths.length,
    header: { values: first.values, vocabTokens: firstVocab(shards) },
    ...sumShards(shards),
    projectorBytes: 0,
  };
}

/**
 * Weights of all shards. Where the list of tensors does not explain a file's size, the size counts,
 * which is never too little.
 */
function sumShards(shards: readonly GgufFile[]): { weightsBytes: number; warnings: string[] } {
  if (shards.every((shard) => shard.tensorCount === 0)) {
    const weightsBytes = sumOf(shards, (shard) => shard.fileBytes);
    return { weightsBytes, warnings: ["the file lists no tensors: its size counts as weights"] };
  }
  return {
    weightsBytes: sumOf(shards, (shard) => shard.tensorBytes + shard.surplusBytes),
    warnings: shards.filter((shard) => shard.surplusBytes > 0).map((shard) =>
      `${shard.surplusBytes} bytes follow the last tensor's data: the file may be damaged, ` +
      "they count as weights"
    ),
  };
}

function firstVocab(shards: readonly GgufFile[]): number | null {
  return shards.find((shard) => shard.vocabTokens !== null)?.vocabTokens ?? null;
}

function loadHfModel(folder: string): LoadedModel {
  const configPath = join(folder, "config.json");
  const header = parseHfConfig(readModelText(configPath), configPath);
  const paths = listSafetensors(folder);
  const bytes = paths.map((path) =>
    withByteSource(path, (source) => readSafetensorsBytes(source, path))
  );
  return {
    source: "hf",
    path: folder,
    files: paths.length,
    header,
    weightsBytes: sumOf(bytes, (size) => size),
    projectorBytes: 0,
    warnings: ["weights count as they are stored; a server that converts them needs other room"],
  };
}

/** The files of a model: those of the index, else the one with the usual name, else all. */
function listSafetensors(folder: string): string[] {
  const indexPath = join(folder, "model.safetensors.index.json");
  if (isFilePath(indexPath)) {
    const map = parseObjectText(readModelText(indexPath), indexPath)["weight_map"];
    const names = new Set(Object.values(isRecord(map) ? map : {}).map(String));
    const odd = [...names].find((name) => basename(name) !== name);
    if (odd !== undefined) throw refusal(`Cannot read "${indexPath}": file "${odd}"`);
    return [...names].sort().map((name) => join(folder, name));
  }
  const single = join(folder, "model.safetensors");
  if (isFilePath(single)) return [single];
  const names = [...Deno.readDirSync(folder)].map((entry) => entry.name);
  const found = names.filter((name) => name.endsWith(".safetensors")).sort();
  if (found.length > 0) return found.map((name) => join(folder, name));
  throw refusal(`Cannot read model folder "${folder}": it holds no safetensors files`);
}

/** Where ollama keeps its models: OLLAMA_MODELS, else the user's and the service's folder. */
function listOllamaFolders(): string[] {
  const named = readEnv("OLLAMA_MODELS");
  if (named !== undefined) return [named];
  const home = homeDir();
  return [
    ...(home === undefined ? [] : [join(home, ".ollama", "models")]),
    "/usr/share/ollama/.ollama/models",
  ];
}

function homeDir(): string | undefined {
  return readEnv("HOME") ?? readEnv("USERPROFILE");
}

/** Loads the model that ollama knows by this name; null when it knows none. */
function loadOllamaModel(name: string): LoadedModel | null {
  const manifest = parseOllamaName(name);
  if (manifest === null) return null;
  for (const folder of listOllamaFolders()) {
    const path = join(folder, manifest);
    if (!isFilePath(path)) continue;
    const { model, projectors } = parseOllamaManifest(readModelText(path), path);
    const loaded = loadGgufModel(join(folder, model), "ollama");
    const projectorBytes = sumOf(projectors, (blob) => readBlobSize(join(folder, blob)));
    return { ...loaded, path, projectorBytes };
  }
  return null;
}

function readBlobSize(path: string): number {
  return withByteSource(path, (source) => source.sizeBytes);
}

/** Loads a model file or folder by its path. */
function loadModelPath(path: string): LoadedModel {
  if (isDirectory(path)) return loadHfModel(path);
  if (basename(path) === "config.json") return loadHfModel(dirname(path));
  return loadGgufModel(path, "gguf");
}

/** Resolves a path of models.json or the command line; `~` is the home folder. */
function resolveModelPath(path: string, baseDir: string): string {
  const home = homeDir();
  if (home !== undefined && /^~(?=[/\\]|$)/.test(path)) return home + path.slice(1);
  return isAbsolute(path) ? path : join(baseDir, path);
}

/** A path rather than a name: it ends like a model file, or something is there. */
function looksLikePath(text: string): boolean {
  return text.endsWith(".gguf") || /^(?:[.~]{0,2}[/\\]|[A-Za-z]:[/\\])/.test(text) ||
    isDirectory(text) || isFilePath(text);
}

/**
 * Runs a program that asks about memory: no input, no inherited library paths (those of a CUDA
 * toolkit hold stubs that break nvidia-smi), a deadline, and no more output kept than needed.
 */
async function runProbe(argv: readonly [string, ...string[]]): Promise<ProbeOutput> {
  const isWindows = Deno.build.os === "windows";
  const env = { PATH: readEnv("PATH") ?? "/usr/bin:/bin", HOME: homeDir() ?? "/", LC_ALL: "C" };
  let child: Deno.ChildProcess;
  try {
    child = new Deno.Command(argv[0], {
      args: argv.slice(1),
      stdin: "null",
      stdout: "piped",
      stderr: "piped",
      // Windows programs need more of the environment than can be named here.
      ...(isWindows ? {} : { clearEnv: true, env, detached: true }),
    }).spawn();
  } catch (error) {
    if (error instanceof Deno.errors.NotFound) return { end: "missing" };
    return { end: "failed", message: describeReadError(error) };
  }
  const streams = [child.stdout.getReader(), child.stderr.getReader()] as const;
  let timer: ReturnType<typeof setTimeout> | undefined;
  const deadline = new Promise<null>((expire) => {
    timer = setTimeout(() => expire(null), PROBE_DEADLINE_MS);
  });
  const texts = Promise.all([child.status, readProbeText(streams[0]), readProbeText(streams[1])]);
  const ended = await Promise.race([texts, deadline]);
  clearTimeout(timer);
  if (ended !== null) {
    return { end: "exited", code: ended[0].code, stdout: ended[1], stderr: ended[2] };
  }
  killProbe(child, isWindows);
  // A descendant may hold the pipes open: they are let go, not waited for.
  await Promise.all(streams.map((stream) => stream.cancel()));
  return { end: "timeout", deadlineMs: PROBE_DEADLINE_MS };
}

function killProbe(child: Deno.ChildProcess, isWindows: boolean): void {
  try {
    if (isWindows) child.kill("SIGKILL");
    else Deno.kill(-child.pid, "SIGKILL");
  } catch {
    // It ended in the same moment.
  }
}

async function readProbeText(stream: ReadableStreamDefaultReader<Uint8Array>): Promise<string> {
  const decoder = new TextDecoder();
  let text = "";
  for (;;) {
    const { value, done } = await stream.read();
    if (done) return text;
    if (text.length < PROBE_OUTPUT_BYTES) text += decoder.decode(value, { stream: true });
  }
}

async function runNvidiaSmi(): Promise<ProbeOutput> {
  let output: ProbeOutput = { end: "missing" };
  for (const program of NVIDIA_SMI_PATHS) {
    output = await runProbe([program, ...NVIDIA_QUERY]);
    if (output.end !== "missing") break;
  }
  return output;
}

/** Asks everything that this system may answer. */
async function probeDevices(): Promise<ProbeReport[]> {
  switch (Deno.build.os) {
    case "darwin":
      return [
        parseAppleSysctl(await runProbe(["sysctl", "-n", "hw.memsize", "iogpu.wired_limit_mb"])),
      ];
    case "windows":
      return await probeWindows();
    default:
      return await probeLinux();
  }
}

async function probeLinux(): Promise<ProbeReport[]> {
  const [facts, smi] = await Promise.all([
    runProbe(["sh", "-c", LINUX_FACTS_SCRIPT]),
    runNvidiaSmi(),
  ]);
  const files = parseLinuxFacts(facts.end === "exited" ? facts.stdout : "");
  const host = parseHostMemory(files);
  const cuda = Deno.env.get("CUDA_VISIBLE_DEVICES") ?? null;
  return [
    explainMissingSmi(parseNvidiaSmi(smi, cuda, host), files),
    await probeAmd(files, host),
    parseIntelSysfs(files),
    describeHost(host),
  ];
}

async function probeAmd(
  files: ReadonlyMap<string, string>,
  host: HostMemory | null,
): Promise<ProbeReport> {
  const visible = Deno.env.get("HIP_VISIBLE_DEVICES") ?? Deno.env.get("ROCR_VISIBLE_DEVICES") ??
    null;
  const sysfs = parseAmdSysfs(files, visible, host);
  if (sysfs.state === "found" || sysfs.reason?.includes("hides all")) return sysfs;
  const rocm = parseRocmSmi(
    await runProbe(["rocm-smi", "--showmeminfo", "vram", "--json"]),
    visible,
  );
  return rocm.state === "found" ? rocm : sysfs;
}

async function probeWindows(): Promise<ProbeReport[]> {
  const memoryCommand = "$m = Get-CimInstance Win32_OperatingSystem; " +
    '"$($m.FreePhysicalMemory) $($m.TotalVisibleMemorySize)"';
  const [smi, registry, memory] = await Promise.all([
    runNvidiaSmi(),
    runProbe([
      "reg",
      "query",
      WINDOWS_DISPLAY_CLASS,
      "/s",
      "/v",
      "HardwareInformation.qwMemorySize",
    ]),
    runProbe(["powershell", "-NoProfile", "-Command", memoryCommand]),
  ]);
  const host = parseWindowsMemory(memory);
  const nvidia = parseNvidiaSmi(smi, Deno.env.get("CUDA_VISIBLE_DEVICES") ?? null, host);
  // The registry lists NVIDIA's cards too, without telling what is free.
  const others = nvidia.state === "found" ? [] : [parseWindowsRegistry(registry)];
  return [nvidia, ...others, describeHost(host)];
}

// --- Commands ---

/** What is asked about: a model by name and path, what is declared of it, how it is run. */
interface ModelRequest {
  name: string | null;
  path: string | null;
  declared: { source: "env" | "models.json"; tokens: number } | null;
  mmprojPath: string | null;
  settings: CacheSettings;
}

function newDetectReport(): DetectReport {
  return {
    schema_version: 1,
    available_context_tokens: null,
    available_context_kb: null,
    loop_mode_eligible: false,
    floor_tokens: FLOOR_TOKENS,
    reason: null,
    hint: null,
    source: "none",
    model: null,
    devices: [],
    probes: [],
    memory: null,
    memory_at_context: null,
    budget: null,
    assumptions: null,
    warnings: [],
  };
}

/** Sets the answer to print; whether a loop may run is decided on the exact figure. */
function setFigure(
  report: DetectReport,
  { exactTokens, usableTokens }: { exactTokens: number; usableTokens: number },
): void {
  report.available_context_tokens = usableTokens;
  report.available_context_kb = usableTokens;
  report.loop_mode_eligible = exactTokens >= FLOOR_TOKENS;
  if (report.loop_mode_eligible) return;
  report.reason = `a context window of ${exactTokens} tokens is below the floor of ` +
    `${FLOOR_TOKENS} tokens for loops`;
  report.hint = "vram-detect --explain";
}

/** Answers one command line; a refusal becomes the report's reason. */
async function detectContext(options: DetectOptions): Promise<[DetectReport, string[]]> {
  const report = newDetectReport();
  const raises: string[] = [];
  try {
    const request = selectModel(options);
    report.model = request.name === null ? null : { name: request.name };
    if (request.declared !== null) {
      const { source, tokens } = request.declared;
      report.source = source;
      setFigure(report, { exactTokens: tokens, usableTokens: tokens });
    }
    if (request.declared === null || options.contextTokens !== null) {
      raises.push(...await measureModel(report, request, options));
    }
  } catch (error) {
    if (!(error instanceof RefusedError)) throw error;
    report.reason = error.message;
    report.hint = error.hint;
  }
  return [report, raises];
}

function selectModel(options: DetectOptions): ModelRequest {
  const text = readEnv("AUTOMATON_CONTEXT_TOKENS");
  const envTokens = text === undefined ? null : parseTokenCount(text, "AUTOMATON_CONTEXT_TOKENS");
  const settings: CacheSettings = {
    kvTypeK: options.kvTypeK ?? "f16",
    kvTypeV: options.kvTypeV ?? "f16",
    slots: options.slots ?? 1,
    ubatchTokens: options.ubatchTokens,
  };
  const declared = envTokens === null ? null : { source: "env" as const, tokens: envTokens };
  const base = { declared, mmprojPath: null, settings };
  // A declared window needs no model; a path needs no models.json.
  if (declared !== null && options.contextTokens === null) {
    return { ...base, name: options.model, path: null };
  }
  const models = readModelsOrRefuse();
  const name = options.model ?? models?.default ?? null;
  const entry = name !== null && models !== null && Object.hasOwn(models.models, name)
    ? models.models[name] ?? null
    : null;
  if (entry !== null && models !== null) {
    return selectEntry({ name, entry, baseDir: dirname(models.path), base, options });
  }
  const path = name !== null && looksLikePath(name) ? resolveModelPath(name, Deno.cwd()) : null;
  return { ...base, name, path };
}

function selectEntry(
  { name, entry, baseDir, base, options }: {
    name: string | null;
    entry: ModelEntry;
    baseDir: string;
    base: Omit<ModelRequest, "name" | "path">;
    options: DetectOptions;
  },
): ModelRequest {
  const tokens = entry.context_tokens;
  const kvType = entry.kv_type;
  if (kvType !== undefined && !Object.hasOwn(KV_TYPES, kvType)) {
    const known = Object.keys(KV_TYPES).join(", ");
    throw refusal(
      `Cannot use models.json: model "${name}": kv_type "${kvType}" is none of ${known}`,
    );
  }
  return {
    name,
    path: entry.gguf === undefined ? null : resolveModelPath(entry.gguf, baseDir),
    declared: base.declared ??
      (tokens === undefined ? null : { source: "models.json" as const, tokens }),
    mmprojPath: entry.mmproj === undefined ? null : resolveModelPath(entry.mmproj, baseDir),
    settings: {
      kvTypeK: options.kvTypeK ?? kvType ?? "f16",
      kvTypeV: options.kvTypeV ?? kvType ?? "f16",
      slots: options.slots ?? entry.slots ?? 1,
      ubatchTokens: options.ubatchTokens,
    },
  };
}

/** Reads models.json of the project, else of the framework; outside a project only the latter. */
function readModelsOrRefuse(): ModelsFile | null {
  const framework = findFrameworkDir(import.meta.url);
  try {
    return readModels(findDetectProject() ?? framework, framework);
  } catch (error) {
    if (error instanceof RefusedError) throw error;
    throw refusal(error instanceof Error ? error.message : String(error));
  }
}

/** The project, or null when none was named and none is here: a window can be asked anywhere. */
function findDetectProject(): string | null {
  try {
    return findProjectDir(undefined, false);
  } catch (error) {
    if (readEnv("AUTOMATON_PROJECT") !== undefined) throw error;
    return null;
  }
}

function loadRequestedModel(request: ModelRequest): LoadedModel {
  const { name, path, mmprojPath } = request;
  if (name === null) {
    throw refusal(
      "no model is declared: AUTOMATON_CONTEXT_TOKENS is not set, models.json names no default " +
        "and --model is not given",
      "vram-detect --model FILE.gguf",
    );
  }
  const loaded = path === null ? loadOllamaModel(name) : loadModelPath(path);
  if (loaded === null) {
    throw refusal(
      `Cannot find model "${name}": models.json declares neither its context_tokens nor its ` +
        "gguf, and ollama has no model of this name",
      "vram-detect --model FILE.gguf",
    );
  }
  const mmprojBytes = mmprojPath === null ? 0 : readBlobSize(mmprojPath);
  return { ...loaded, projectorBytes: loaded.projectorBytes + mmprojBytes };
}

/** Fills the report from a model file and the devices; returns what would raise the answer. */
async function measureModel(
  report: DetectReport,
  request: ModelRequest,
  options: DetectOptions,
): Promise<string[]> {
  const loaded = loadRequestedModel(request);
  const shape = describeModel(loaded.header);
  const model = { shape, weightsBytes: loaded.weightsBytes + loaded.projectorBytes };
  const { settings } = request;
  checkCacheTypes(shape, settings);
  report.model = describeForReport(request, loaded, shape);
  report.memory = describeMemory(loaded, shape, settings);
  report.assumptions = describeAssumptions(settings, shape);
  report.warnings.push(
    ...loaded.warnings,
    ...shape.upperBounds.map((why) => `upper bound: ${why}`),
  );
  if (options.contextTokens !== null) {
    report.memory_at_context = memoryAtContext(model, settings, options.contextTokens);
  }
  if (request.declared !== null) return [];
  await addDevices(report, options.freeMib);
  const budget = computeBudget(report.devices);
  const exactTokens = largestContext(model, settings, budget.total_bytes);
  report.budget = describeBudget(budget, exactTokens, shape);
  report.source = loaded.source;
  const usableTokens = roundContext(exactTokens);
  if (usableTokens === 0) {
    const needed = memoryAtContext(model, settings, CONTEXT_STEP_TOKENS).total_bytes;
    report.reason = `the model does not fit: ${CONTEXT_STEP_TOKENS} tokens need ` +
      `${formatMib(needed)}, the budget is ${formatMib(budget.total_bytes)}`;
    report.hint = "vram-detect --explain";
  } else setFigure(report, { exactTokens, usableTokens });
  return listRaises(model, settings, budget.total_bytes);
}

async function addDevices(report: DetectReport, freeMib: number | null): Promise<void> {
  if (freeMib !== null) {
    report.devices.push({
      id: "what-if",
      name: "--free-mib",
      kind: "what-if",
      ...readingOf(freeMib * MIB, freeMib * MIB, ""),
    });
    return;
  }
  for (const { probe, state, reason, devices } of await probeDevices()) {
    report.probes.push({ probe, state, reason });
    report.devices.push(...devices);
    if (state === "unknown" && devices.length === 0) {
      report.devices.push(newUnknownDevice(probe, reason ?? "no reason given"));
    }
  }
  for (const device of report.devices) {
    if (device.free_bytes !== null) continue;
    report.warnings.push(`${device.name}: free memory unknown: ${device.unknown_reason}`);
  }
}

/** Stands for what a failed probe could have found, so that it is not taken for absent. */
function newUnknownDevice(probe: string, reason: string): DeviceReport {
  return {
    id: probe,
    name: `${probe} device`,
    kind: probe === "cpu" ? "cpu" : probe === "apple" ? "integrated" : "discrete",
    ...readingOf(null, null, reason),
  };
}

function describeForReport(
  request: ModelRequest,
  loaded: LoadedModel,
  shape: ModelShape,
): Record<string, string | number | boolean | null> {
  const count = (is: (layer: LayerShape) => boolean) => shape.layers.filter(is).length;
  return {
    name: request.name,
    path: loaded.path,
    files: loaded.files,
    architecture: shape.architecture,
    layers: shape.layers.length,
    full_context_layers: count((layer) => layer.keyElements > 0 && !layer.isSliding),
    sliding_layers: count((layer) => layer.keyElements > 0 && layer.isSliding),
    recurrent_layers: count((layer) => layer.stateBytes > 0),
    window_tokens: shape.windowTokens,
    native_context_tokens: shape.nativeTokens,
    is_upper_bound: shape.upperBounds.length > 0,
  };
}

/** The terms of the derivation: those that are fixed and those that grow with each token. */
function describeMemory(
  loaded: LoadedModel,
  shape: ModelShape,
  settings: CacheSettings,
): Record<string, number> {
  const none = memoryAtContext({ shape, weightsBytes: 0 }, settings, 0);
  const most = memoryAtContext({ shape, weightsBytes: 0 }, settings, 2 ** 31);
  return {
    weights_bytes: loaded.weightsBytes,
    projector_bytes: loaded.projectorBytes,
    kv_bytes_per_token: bytesPerCell(shape, settings).full,
    kv_swa_bytes: most.kv_swa_bytes,
    recurrent_bytes: none.recurrent_bytes,
    compute_bytes: none.compute_bytes,
    compute_bytes_per_token: 4 * settings.ubatchTokens,
  };
}

function describeAssumptions(
  settings: CacheSettings,
  shape: ModelShape,
): Record<string, string | number | boolean> {
  return {
    kv_type_k: settings.kvTypeK,
    kv_type_v: settings.kvTypeV,
    slots: settings.slots,
    slots_share_cells: true,
    ubatch_tokens: settings.ubatchTokens,
    flash_attention: true,
    all_layers_on_device: true,
    vocab_tokens: shape.vocabTokens,
  };
}

function describeBudget(
  budget: MemoryBudget,
  exactTokens: number,
  shape: ModelShape,
): BudgetReport {
  return {
    ...budget,
    exact_context_tokens: exactTokens,
    native_context_tokens: shape.nativeTokens,
    limited_by: exactTokens === shape.nativeTokens ? "the native context" : "memory",
  };
}

// --- Command table ---

/** All options, in the order of `--help`. */
// deno-fmt-ignore -- a table: one row a line.
export const DETECT_OPTIONS: readonly OptionSpec[] = [
  { name: "model", value: "NAME|FILE", help: "a model of models.json, a .gguf file, a folder with config.json, an ollama model (default: models.json's default)" },
  { name: "kv-type", value: "TYPE", help: `type of the KV cache: ${Object.keys(KV_TYPES).join(", ")} (default: models.json's kv_type, else f16)` },
  { name: "kv-type-k", value: "TYPE", help: "type of its K part alone" },
  { name: "kv-type-v", value: "TYPE", help: "type of its V part alone" },
  { name: "slots", value: "N", help: "sequences at the same time (default: models.json's slots, else 1)" },
  { name: "ubatch", value: "N", help: `tokens of a physical batch (default: ${DEFAULT_UBATCH_TOKENS})` },
  { name: "context", value: "N", help: "also answer what N tokens of context need" },
  { name: "free-mib", value: "N", help: "suppose N MiB free on one device instead of asking the machine" },
  { name: "loop-mode", help: `say whether a loop may run, that is, whether the window holds ${FLOOR_TOKENS} tokens` },
  { name: "explain", help: "the derivation as a table" },
  { name: "json", help: "one line of JSON, the last of stdout" },
  { name: "help", help: "this text" },
  { name: "version", help: "the framework's version" },
];

/** The text of `--help`. */
export function renderDetectHelp(): string {
  return `vram-detect: how many tokens of context a model can hold on this machine

Usage: vram-detect [OPTION ...]

The first that answers: AUTOMATON_CONTEXT_TOKENS; context_tokens in models.json; a model file
measured against the memory that is free. Exit code 0: a figure was found; 1: none could be.

Options:
${renderOptions(DETECT_OPTIONS)}`;
}

function readDetectOptions(given: ReadonlyMap<string, string | true>): DetectOptions {
  const readType = (name: string): string | null => {
    const type = given.get(name);
    if (type === undefined) return null;
    if (Object.hasOwn(KV_TYPES, `${type}`)) return `${type}`;
    const known = Object.keys(KV_TYPES);
    const nearest = findNearest(`${type}`, known);
    const advice = nearest === null ? known.join(", ") : `did you mean ${nearest}?`;
    throw new UsageError(`Cannot read flag "--${name}": "${type}" is no cache type (${advice})`);
  };
  const readNumber = (name: string, max: number) => readWholeNumber(given, name, { min: 1, max });
  const model = given.get("model");
  return {
    isJson: given.has("json"),
    isExplain: given.has("explain"),
    isLoopMode: given.has("loop-mode"),
    model: model === undefined ? null : `${model}`,
    kvTypeK: readType("kv-type-k") ?? readType("kv-type"),
    kvTypeV: readType("kv-type-v") ?? readType("kv-type"),
    slots: readNumber("slots", 4096) ?? null,
    ubatchTokens: readNumber("ubatch", 65536) ?? DEFAULT_UBATCH_TOKENS,
    contextTokens: readNumber("context", 2 ** 31) ?? null,
    freeMib: readNumber("free-mib", 2 ** 31) ?? null,
  };
}

// --- Main ---

function printReport(
  report: DetectReport,
  raises: readonly string[],
  options: DetectOptions,
): void {
  // With --json, stdout is for the one line.
  if (options.isExplain) {
    const table = renderExplanation(report, raises);
    if (options.isJson) console.error(table);
    else console.log(table);
  } else if (!options.isJson && report.available_context_tokens !== null) {
    console.log(`${report.available_context_tokens}`);
  }
  if (!options.isJson && !options.isExplain) {
    for (const warning of report.warnings) console.error(`warning: ${warning}`);
    if (report.reason !== null) console.error(`vram-detect: ${report.reason}`);
    else if (options.isLoopMode) console.error("vram-detect: a loop may run");
    if (report.hint !== null) console.error(`hint: ${report.hint}`);
  }
  if (options.isJson) console.log(JSON.stringify(report));
}

/** Runs one command line; returns the exit code. */
export async function runVramDetect(args: readonly string[]): Promise<number> {
  try {
    const given = parseCommandLine(args, DETECT_OPTIONS);
    if (given.has("help")) {
      console.log(renderDetectHelp().trimEnd());
      return 0;
    }
    if (given.has("version")) {
      console.log(`vram-detect ${readVersion(findFrameworkDir(import.meta.url))}`);
      return 0;
    }
    const options = readDetectOptions(given);
    const [report, raises] = await detectContext(options);
    printReport(report, raises, options);
    const answer = options.contextTokens === null
      ? report.available_context_tokens
      : report.memory_at_context;
    return answer === null ? 1 : 0;
  } catch (error) {
    return reportFailure(error, "vram-detect", args);
  }
}

if (import.meta.main) Deno.exit(await runVramDetect(Deno.args));

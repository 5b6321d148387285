#!/usr/bin/env bash
# Serves a model by vLLM's API server, and prefixd keeps its prompts:
#
#   examples/python/vllm_serve.sh [--attach] MODEL PREFIXD [options of vllm serve]
#
#   --attach  stored prompts of 2,048 tokens and more stay in prefixd instead of coming into vLLM's cache, and
#             each generated token reads 2% of them, or what its request says
#   MODEL     a directory with a checkpoint
#   PREFIXD   a daemon's address (unix:/path, tcp:host:port), or a directory for a store
#
# For the sources' own build (make python-module) and vLLM (scripts/setup_python.sh vllm). vllm_ask.py beside
# it asks the server.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
attach=false lost=recompute checks=()
if [ "${1:-}" = --attach ]; then
  # What has no blocks cannot be computed again in them; a wrong policy is refused when its request comes.
  attach=true lost=fail checks=(--logits-processors prefixd.vllm.attached.policy:PolicyCheck)
  shift
fi
[ $# -ge 2 ] || { sed -n '2,12s/^# \{0,1\}//p' "$0" >&2; exit 2; }
model=$1 prefixd=$2
shift 2

export PYTHONPATH=$root/python${PYTHONPATH:+:$PYTHONPATH}
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
# Both cores of a small machine compute, none is reserved; 1 GiB is for keys and values.
export VLLM_CPU_NUM_OF_RESERVED_CPU=${VLLM_CPU_NUM_OF_RESERVED_CPU:-0}
export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}

# This is `vllm serve`; the command itself looks for a package of another name than vllm-cpu.
exec "$root/.venv/bin/python" -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name "$(basename "$model")" \
  --dtype float32 --max-model-len 8192 --enforce-eager --enable-prompt-tokens-details "${checks[@]}" \
  --kv-transfer-config '{"kv_connector": "PrefixdConnector", "kv_connector_module_path": "prefixd.vllm",
    "kv_role": "kv_both", "kv_load_failure_policy": "'$lost'",
    "kv_connector_extra_config": {"prefixd": "'"$prefixd"'", "attach": '$attach'}}' "$@"

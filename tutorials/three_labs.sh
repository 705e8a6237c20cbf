#!/usr/bin/env bash
# A hub and three labs on this machine. Nobody's experiment is a program: each lab asks for a trial,
# takes its time, and tells what came of it. The hub dies twice meanwhile.
#
#   bash tutorials/three_labs.sh [FOLDER]      # default three-labs; needs botorch_fed[flower]
#
# On real machines the parts between the lines run on different ones, and a trial takes a day.
set -euo pipefail
folder=${1:-three-labs}
port=${PORT:-8010}
export OMP_NUM_THREADS=1
mkdir "$folder"
cd "$folder"
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT

# ---- agreed between all: what is tuned, and how
cat > study.toml <<'END'
objective = "ask"
agents = ["north", "south", "west"]
budget = 4
seed = 0
[space]
temperature = { type = "real", lower = 150, upper = 250 }
minutes = { type = "integer", lower = 10, upper = 60 }
[outcome]
name = "yield"
[protocol]
name = "fts"
END

# ---- at the hub
botorch-fed hub init hub --address localhost --port "$port"
start_hub() {
  botorch-fed hub start hub --host 127.0.0.1 >> hub.log 2>&1 & hub=$!
  until botorch-fed hub sites hub > /dev/null 2>&1; do sleep 1; done
}
start_hub
for site in north south west; do botorch-fed site init "$site"; done
botorch-fed hub admit hub north north/node.pub
botorch-fed hub admit hub south south/node.pub
botorch-fed hub admit hub west west/node.pub

# ---- at each lab: one process that answers the hub …
for site in north south west; do
  botorch-fed site start "$site" study.toml --name "$site" --hub "localhost:$port" \
    --ca hub/ca.crt > "$site.log" 2>&1 &
done

# ---- … and somebody with a shell: north is fast, west needs its time, south loses a sample
lab() {
  local site=$1 seconds=$2 told=0
  while [ "$told" -lt 4 ]; do
    botorch-fed site ask "$site" --json > "$site.json" 2> /dev/null || { sleep 2; continue; }
    read -r trial value < <(python3 - "$site.json" <<'END'
import json, sys
for trial in json.load(open(sys.argv[1]))["trials"]:
    t, m = trial["parameters"]["temperature"], trial["parameters"]["minutes"]
    print(trial["id"], 1 - ((t - 190) / 50) ** 2 - ((m - 34) / 25) ** 2)
END
    ) || { sleep 2; continue; }
    sleep "$seconds"
    if [ "$site" = south ] && [ "$told" = 1 ]; then
      botorch-fed site fail "$site" "$trial" --reason "the sample was lost"
    else
      botorch-fed site tell "$site" "$trial" "$value"
    fi
    told=$((told + 1))
  done
}
lab north 2 & labs=$!
lab south 5 & labs="$labs $!"
lab west 20 & labs="$labs $!"

# ---- at the hub: it dies after a while, twice, and goes on
run() { botorch-fed hub run hub study.toml --out run --deadline 10 --absence 10 "$@"; }
for again in "" --resume; do
  run $again >> run.log 2>&1 & running=$!
  sleep "${DIES_AFTER:-40}"
  kill -9 "$running" "$hub" 2>/dev/null || true
  sleep 3
  start_hub
done
run --resume

# ---- at each lab
wait $labs
for site in north south west; do botorch-fed site status "$site"; done

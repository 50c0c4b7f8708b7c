#!/usr/bin/env bash
# scripts/tpu_vm.sh NAME ZONE v6e-8 configs/tpu_v6e_8.toml
#
# Makes a TPU VM (v5litepod-8, v6e-8 or v5p-16), installs this checkout on each of its hosts and serves a configuration
# there; the same command again uses the machine that is there. $HF_TOKEN, where it is set, opens gated models. Ctrl-C
# ends the server, `gcloud compute tpus tpu-vm delete NAME --zone ZONE` the machine. To ask it something from here:
#   gcloud compute tpus tpu-vm ssh NAME --zone ZONE --worker=0 -- -L 8000:localhost:8000
# NOT RUN on Google Cloud; a test runs it with a stand-in for gcloud.
set -euo pipefail
if [ $# -ne 4 ] || [ ! -f "$4" ]; then
  echo "usage: scripts/tpu_vm.sh NAME ZONE TYPE CONFIG.toml (from the checkout)" >&2
  exit 2
fi
name=$1 zone=$2 type=$3 config=$4
case $type in
  v5litepod-*) version=v2-alpha-tpuv5-lite ;;
  v6e-*) version=v2-alpha-tpuv6e ;;
  v5p-*) version=v2-alpha-tpuv5 ;;
  *)
    echo "TYPE: got $type, must be v5litepod-N, v6e-N or v5p-N" >&2
    exit 2
    ;;
esac
tpu() { gcloud compute tpus tpu-vm "$@" --zone "$zone"; }
everywhere() { tpu ssh "$name" --worker=all --command "$1"; }

if ! tpu describe "$name" > /dev/null 2>&1; then
  tpu create "$name" --accelerator-type "$type" --version "$version"
fi
parcel=$(mktemp -d)
trap 'rm -rf "$parcel"' EXIT
git archive --format tar.gz -o "$parcel/jaxinfer.tar.gz" HEAD
(umask 077 && printf %s "${HF_TOKEN:-}" > "$parcel/hf_token") # a command line would show it to everybody
tpu scp "$parcel/jaxinfer.tar.gz" "$parcel/hf_token" "$name:" --worker=all
everywhere 'mkdir -p jaxinfer && tar -xzf jaxinfer.tar.gz -C jaxinfer && cd jaxinfer &&
  python3 -m venv .venv && .venv/bin/pip install -q -e ".[tpu,serve,hub]"'
# One process a host; they find each other by what the machine tells them, and the first serves.
everywhere "chmod 600 hf_token && export HF_TOKEN=\$(cat hf_token) && cd jaxinfer && .venv/bin/jaxinfer serve --config $config"

"""GuideLLM, a generator of load: a short run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from features import API_KEY, BASE_URL, CHAT_MODEL, TOKENIZER, feature, report

REQUESTS = 4
TOLD = Path("told.json").absolute()


@feature("a load of streamed chats: time to the first token, time between tokens")
def chats() -> None:
    server = f"kind=openai_http,target={BASE_URL},model={CHAT_MODEL},api_key={API_KEY}"
    command = ["guidellm", "run", "--backend", server]
    command += ["--profile", "kind=concurrent,streams=2"]
    command += ["--constraint", f"kind=max_requests,count={REQUESTS}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=48,output_tokens=16"]
    command += ["--output", f"kind=json,path={TOLD}", "--disable-console-interactive"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stdout[-3000:] + done.stderr[-3000:])
    metrics = json.loads(TOLD.read_text())["benchmarks"][0]["metrics"]
    assert metrics["request_totals"]["successful"] == REQUESTS
    assert metrics["request_totals"]["errored"] == 0
    assert metrics["time_to_first_token_ms"]["successful"]["median"] > 0
    assert metrics["inter_token_latency_ms"]["successful"]["median"] > 0


report("guidellm")

"""A plain FastAPI server around Hugging Face pipelines, for serve.py: what one writes first.

    python benchmarks/peers/huggingface_server.py CLASSIFIER_FOLDER CAUSAL_FOLDER PORT THREADS

The handlers are ordinary functions, which FastAPI runs in its thread pool; each request is computed on its own.
"""

import os
import sys
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
from transformers.utils import logging


class ClassifyRequest(BaseModel):
    input: str


class CompletionRequest(BaseModel):
    prompt: list[int]
    max_tokens: int


def create_app(classifier_folder: str, causal_folder: str) -> FastAPI:
    app = FastAPI()
    classifier: Any = pipeline("text-classification", classifier_folder, device="cpu")
    model: Any = AutoModelForCausalLM.from_pretrained(causal_folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(causal_folder)

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/v1/classify")
    def classify(body: ClassifyRequest) -> Any:
        return {"predictions": classifier([body.input], top_k=None, truncation=True)}

    @app.post("/v1/completions")
    def complete(body: CompletionRequest) -> Any:
        prompt = torch.tensor([body.prompt])
        with torch.inference_mode():
            tokens = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=body.max_tokens, do_sample=False
            )
        return {"choices": [{"text": tokenizer.decode(tokens[0, len(body.prompt) :], skip_special_tokens=True)}]}

    return app


def main() -> None:
    logging.set_verbosity_error()
    classifier, causal, port, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    uvicorn.run(create_app(classifier, causal), port=int(port), log_level="warning")


if __name__ == "__main__":
    main()

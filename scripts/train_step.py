"""Parts of a training step, and its matrix work against a bare `torch.mm` at the same shapes.

    python scripts/train_step.py --data answers.jsonl [--target smollm2-135m-instruct] [--steps 8] [--threads 2]

Prints seconds per part (median over steps), the share of the step that is spent in matrix products, and the rate of
its matrix work (all products' operations divided by the whole step) as a share of what `torch.mm` alone reaches on the
same products.
"""

import argparse
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from dspark_hf.training.dataset import AnchorDataset, collate
from dspark_hf.training.prepare import prepare
from dspark_hf.training.recipe import TrainingRequest
from dspark_hf.training.settings import DSparkTrainingArguments
from dspark_hf.training.trainer import DSparkTrainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        request = TrainingRequest(target=options.target, data=(options.data,), output=Path(folder))
        prepared = prepare(request, print)
        is_cpu = prepared.target.device.type == "cpu"
        arguments = DSparkTrainingArguments(output_dir=folder, bf16=True, use_cpu=is_cpu, report_to=[])
        trainer = DSparkTrainer(prepared.drafter, prepared.target, arguments)
        trainer.create_optimizer_and_scheduler(options.steps)
        batches = make_batches(request, prepared, options.steps + 1)
        one_step(trainer, prepared.drafter, batches[0])  # allocates
        parts = [one_step(trainer, prepared.drafter, batch) for batch in batches[1:]]
        for name in parts[0]:
            values = [part[name] for part in parts]
            print(f"{name:<28} {statistics.median(values) * 1e3:8.1f} ms  (n = {len(values)})")
        report_matrix_work(trainer, prepared.drafter, batches[1], statistics.median(part["step"] for part in parts))


def make_batches(request, prepared, count):  # noqa: ANN001, ANN201
    """Batches of sequences as a run draws them, with the target's features."""
    dataset = AnchorDataset(prepared.train, max_anchors=request.max_anchors, seed=request.seed)
    batches = []
    for i in range(count):
        picked = [dataset[(0, j)] for j in range(i * request.batch_size, (i + 1) * request.batch_size)]
        batch = {name: value.to(prepared.target.device) for name, value in collate(picked).items()}
        batches.append(batch | vars(prepared.reader.read(batch["input_ids"])))
    return batches


def one_step(trainer, drafter, batch):  # noqa: ANN001, ANN201
    """Seconds of forward with loss, backward, optimiser, and all of it."""
    start = time.perf_counter()
    with trainer.accelerator.autocast():  # what a run gets from accelerate
        loss = trainer.compute_loss(drafter, dict(batch))
    forward = time.perf_counter()
    loss.backward()
    backward = time.perf_counter()
    torch.nn.utils.clip_grad_norm_(drafter.parameters(), trainer.args.max_grad_norm)
    trainer.optimizer.step()
    drafter.zero_grad()
    end = time.perf_counter()
    return {
        "forward, loss and its grads": forward - start,
        "backward of the backbone": backward - forward,
        "clipping and optimiser": end - backward,
        "step": end - start,
    }


def report_matrix_work(trainer, drafter, batch, step_s):  # noqa: ANN001, ANN201
    """Compare the step's products with the same products done alone."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        one_step(trainer, drafter, batch)
    products: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
    product_s = whole_s = 0.0
    for event in recorded.key_averages(group_by_input_shape=True):
        whole_s += event.self_cpu_time_total / 1e6
        if event.key in ("aten::mm", "aten::bmm"):
            products[tuple(map(tuple, event.input_shapes[:2]))] += event.count
            product_s += event.self_cpu_time_total / 1e6
    operations = alone_s = 0.0
    for (left, right), count in products.items():
        a, b = torch.randn(left).bfloat16(), torch.randn(right).bfloat16()
        torch.matmul(a, b)
        times = []
        for _ in range(5):
            start = time.perf_counter()
            torch.matmul(a, b)
            times.append(time.perf_counter() - start)
        alone_s += count * min(times)
        operations += count * 2.0 * a.numel() * right[-1]
    print(f"{'products in the step':<28} {operations / 1e9:8.1f} GFLOP, {product_s / whole_s:.0%} of its time")
    print(f"{'bare products':<28} {alone_s * 1e3:8.1f} ms, {operations / alone_s / 1e9:.0f} GFLOP/s")
    print(f"{'whole step':<28} {operations / step_s / 1e9:8.0f} GFLOP/s, {alone_s / step_s:.0%} of the bare rate")


if __name__ == "__main__":
    main()

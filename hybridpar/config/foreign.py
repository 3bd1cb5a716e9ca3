"""Options by the names that other trainers give them, and what they are called here.

python -m hybridpar.config.foreign > docs/names.md
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from hybridpar.errors import UsageError, shortened

#: By who calls them so: the names, and what to write instead, with VALUE for what stands behind the name.
FOREIGN: dict[str, dict[str, str]] = {
    "timm and torchvision": {
        "-b": "--batch-size VALUE",
        "-j --workers": "--loader-workers VALUE (loader processes), --nproc N (training processes)",
        "--wd": "--weight-decay VALUE",
        "--opt": "--optimizer VALUE",
        "--momentum": "--optimizer sgd:momentum=VALUE",
        "--clip-grad-norm": "--clip-grad VALUE",
        "--label-smoothing --smoothing": "--loss ce:smoothing=VALUE",
        "--warmup-epochs --lr-warmup-epochs": "--lr-schedule cosine:warmup=VALUE",
        "--min-lr --lr-min": "--lr-schedule cosine:min=VALUE",
        "--warmup-lr": "--lr-schedule cosine:warmup_lr=VALUE",
        "--model-ema-decay": "--model-ema VALUE",
        "--model-ema-steps": "--model-ema DECAY,every=VALUE",
        "--sync-bn": "--batch-norm sync",
        "--mixup --mixup-alpha": "--mix mixup=VALUE",
        "--cutmix --cutmix-alpha": "--mix cutmix=VALUE",
        "--hflip": "--augment hflip=VALUE",
        "--vflip": "--augment vflip=VALUE",
        "--color-jitter": "--augment color_jitter=VALUE",
        "--scale": "--augment scale=LOW/HIGH",
        "--ratio": "--augment ratio=LOW/HIGH",
        "--interpolation": "--image-size interpolation=VALUE",
        "--train-interpolation": "--image-size train_interpolation=VALUE",
        "--mean": "--image-size mean=R/G/B",
        "--std": "--image-size std=R/G/B",
        "--world-size --dist-url --dist-backend --backend --local_rank --local-rank": (
            "nothing: --nproc N starts the workers, and under torchrun the environment says it"
        ),
        "--print-freq --log-interval": "nothing: the terminal shows every step, and metrics.jsonl has all of them",
        "--output --output-dir": "--run-dir VALUE",
        "--start-epoch": "--resume (the run goes on where it stopped), or --resume-from CHECKPOINT",
        "--dataset --data-set": "--data VALUE",
    },
    "timm": {
        "--pretrained": "--weights default",
        "--pretrained-path --initial-checkpoint": "--weights VALUE",
        "--num-classes": "nothing: the data set says how many classes there are (--model-arg num_classes=N)",
        "--model": "MODEL in front of the options, as `hybridpar train timm/VALUE`",
        "--data-dir": "--data-root VALUE",
        "--img-size": "--image-size VALUE",
        "--input-size": "--image-size SIDE",
        "--in-chans": "--image-size channels=VALUE",
        "--crop-pct": "--image-size crop=VALUE",
        "--gp": "--model-arg global_pool=VALUE",
        "--model-kwargs": "--model-arg KEY=VALUE",
        "--channels-last": "--memory-format channels_last",
        "--amp-dtype": "--amp bf16, or --amp fp16",
        "--torchcompile": "--compile",
        "--grad-accum-steps": "--micro-batches VALUE (--batch-size stays the whole batch of a step)",
        "--grad-checkpointing": "--recompute all",
        "--opt-eps": "--optimizer adamw:eps=VALUE",
        "--opt-betas": "--optimizer adamw:betas=B1/B2",
        "--opt-kwargs": "--optimizer NAME:KEY=VALUE",
        "--clip-mode": "--clip-grad LIMIT,mode=VALUE",
        "--layer-decay": "--optimizer NAME:layer_decay=VALUE",
        "--sched --lr-scheduler": "--lr-schedule VALUE",
        "--sched-on-updates": "nothing: the rate changes in every step (--lr-schedule NAME:update=epoch for epochs)",
        "--lr-base": "--lr VALUE/256",
        "--lr-base-size": "--lr RATE/VALUE",
        "--lr-cycle-mul": "--lr-schedule cosine:cycle=EPOCHS,grow=VALUE",
        "--lr-cycle-decay": "--lr-schedule cosine:cycle=EPOCHS,decay=VALUE",
        "--decay-epochs": "--lr-schedule step:every=VALUE",
        "--decay-milestones": "--lr-schedule multistep:at=E1/E2",
        "--decay-rate": "--lr-schedule step:rate=VALUE",
        "--patience-epochs": "--lr-schedule plateau:patience=VALUE",
        "--cooldown-epochs": "--lr-schedule cosine:cooldown=VALUE",
        "--warmup-prefix": "nothing: it is so (--lr-schedule cosine:warmup_prefix=off)",
        "--aa": "--augment VALUE (`rand-m9-mstd0.5-inc1` is timm:rand-m9-mstd0.5-inc1)",
        "--no-aug": "--augment none,hflip=0",
        "--aug-repeats": "--augment repeats=VALUE",
        "--epoch-repeats": "--epochs, times VALUE",
        "--resplit --aug-splits --jsd-loss": "nothing: there are no splits of augmentation",
        "--reprob": "--augment erase=VALUE",
        "--remode": "--augment erase_mode=VALUE",
        "--bce-loss": "--loss bce",
        "--bce-target-thresh": "--loss bce:threshold=VALUE",
        "--mixup-prob": "--mix prob=VALUE",
        "--mixup-switch-prob": "--mix switch=VALUE",
        "--mixup-off-epoch": "--mix off=VALUE",
        "--drop-path": "--drop path=VALUE",
        "--dist-bn": "--batch-norm pooled",
        "--checkpoint-hist": "--checkpoints keep=VALUE",
        "--model-ema-warmup": "--model-ema DECAY,warmup",
        "--experiment": "--run-dir runs/VALUE",
        "--log-wandb": "--log wandb",
        "--eval-metric": "--checkpoints by=VALUE",
        "--pin-mem --no-prefetcher --fuser --torchscript": "nothing: it is decided by what the device does best",
    },
    "torchvision": {
        "--data-path": "--data-root VALUE",
        "--bias-weight-decay --norm-weight-decay": "--optimizer NAME:decay_all",
        "--lr-warmup-method": "nothing: the warm-up is linear",
        "--lr-warmup-decay": "--lr-schedule NAME:warmup_lr=RATE",
        "--lr-step-size": "--lr-schedule step:every=VALUE",
        "--lr-gamma": "--lr-schedule step:rate=VALUE",
        "--auto-augment": "--augment VALUE",
        "--ra-magnitude": "--augment ra,m=VALUE",
        "--random-erase": "--augment erase=VALUE",
        "--train-crop-size": "--image-size VALUE",
        "--val-crop-size": "--image-size test=VALUE",
        "--val-resize-size": "--image-size crop=PART (the tested square over the resized image)",
        "--ra-sampler": "--augment repeats=3",
        "--ra-reps": "--augment repeats=VALUE",
        "--cache-dataset": "nothing: images are read by --loader-workers processes",
        "--test-only": "`hybridpar evaluate RUN`",
        "--use-deterministic-algorithms": "--deterministic",
    },
    "Hugging Face, Lightning and torchrun": {
        "--learning-rate --learning_rate": "--lr VALUE",
        "--num-train-epochs --num_train_epochs --max-epochs --max_epochs": "--epochs VALUE",
        "--max-steps --max_steps": "--steps VALUE",
        "--per-device-train-batch-size --per_device_train_batch_size": (
            "--batch-size N, the whole batch: VALUE times the number of workers"
        ),
        "--gradient-accumulation-steps --gradient_accumulation_steps --accumulate-grad-batches": (
            "--micro-batches VALUE (--batch-size stays the whole batch of a step)"
        ),
        "--gradient-checkpointing --gradient_checkpointing": "--recompute all",
        "--max-grad-norm --max_grad_norm --gradient-clip-val": "--clip-grad VALUE",
        "--lr-scheduler-type --lr_scheduler_type": "--lr-schedule VALUE",
        "--warmup-ratio --warmup-steps --warmup_ratio --warmup_steps": "--lr-schedule cosine:warmup=EPOCHS",
        "--dataloader-num-workers --dataloader_num_workers --num-workers": "--loader-workers VALUE",
        "--resume-from-checkpoint --resume_from_checkpoint": "--resume, or --resume-from VALUE",
        "--overwrite-output-dir --overwrite_output_dir": "--overwrite",
        "--save-steps --save_steps": "--checkpoints VALUE",
        "--report-to --report_to": "--log VALUE",
        "--torch-compile --torch_compile": "--compile",
        "--fp16": "--amp fp16",
        "--bf16": "--amp bf16",
        "--precision": "--amp bf16, or --amp fp16",
        "--accelerator": "--device cpu; a GPU is taken where there is any",
        "--devices --nproc-per-node --nproc_per_node --num-gpus --gpus": "--nproc VALUE",
        "--nnodes --num-nodes --node-rank": "--hosts FILE, or torchrun",
    },
}


def check_foreign(words: Sequence[str], options: type) -> None:
    """Refuse an option by another trainer's name, and say what to write."""
    ours = {field.name.replace("_", "-") for field in fields(options)} - {"model"}  # which has no flag
    names = {name: (who, text) for who, rows in FOREIGN.items() for key, text in rows.items() for name in key.split()}
    for word, following in zip(words, [*words[1:], ""], strict=False):
        name, equals, value = word.partition("=")
        if name not in names or name[2:] in ours:
            continue
        who, text = names[name]
        value = value if equals else "" if following.startswith("-") else following
        instead = text.replace("VALUE", shortened(value)) if value else text
        why, _, reason = instead.partition("nothing: ")
        fix = f"Leave it out: {reason}." if reason else f"Write {why}."
        raise UsageError(f"there is no option {name}", f"It is a name of {who}.", fix)


def page() -> str:
    """The page of the documentation that lists all names."""
    lines = [
        "# Names of options in other trainers",
        "",
        "Where a name on the left is typed, the command line answers with what stands on the right. VALUE is what was",
        "typed behind the name. All options: `hybridpar train --help-all`.",
    ]
    for who, rows in FOREIGN.items():
        lines += ["", f"## {who}", "", "| there | here |", "|---|---|"]
        lines += [f"| {', '.join(f'`{name}`' for name in key.split())} | {text} |" for key, text in rows.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")

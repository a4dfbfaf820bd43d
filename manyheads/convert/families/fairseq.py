"""fairseq's Transformer: Ott et al. 2019. Its sinusoids have other frequencies than the paper, and positions from 2."""

from __future__ import annotations

from manyheads.convert.config import Config, Fields, Fixed, GetField, Key
from manyheads.convert.families import Architecture, Family
from manyheads.convert.families.marian import DROPOUT, LAYERS
from manyheads.convert.keys import Choice, activation, in_both, number
from manyheads.convert.weights import Ignored, TiedTensor, renames
from manyheads.errors import CheckpointConfigError
from manyheads.spec import Tree, quote

STACKS = ("encoder", "decoder")


class Sinusoids:
    """The widths, and frequencies θ^(−i/(h−1)) for h waves, which equal θ′^(−i/h) of the paper with a higher θ′."""

    keys = ("encoder_embed_dim", "decoder_embed_dim", "decoder_input_dim", "decoder_output_dim")

    def read(self, config: Config) -> Fields:
        fields: Fields = {}
        for name in STACKS:
            width = number(config.get(f"{name}_embed_dim"), f"{name}_embed_dim")
            theta = 10000.0 ** (width // 2 / max(width // 2 - 1, 1))
            fields |= {f"{name}.width": int(width), f"{name}.position.theta": theta}
        for key in self.keys[2:]:
            if config.get(key, width) != width:
                raise CheckpointConfigError(f"{key} is {quote(config[key])}, but the decoder's width is {int(width)}")
        return fields

    def write(self, get: GetField) -> Tree:
        return {f"{name}_embed_dim": get(f"{name}.width") for name in STACKS}


def normalize_before(name: str) -> Choice:
    kinds = ((True, {"kind": "pre"}), (False, {"kind": "post"}))
    return Choice(f"{name}_normalize_before", f"{name}.residual", kinds, False)


BASE: Tree = {
    "embed": {"scale": True},
    "position": {"kind": "sinusoidal", "layout": "halves", "offset": 2},
}

FIXED_FALSE = (
    "adaptive_input", "char_inputs", "cross_self_attention", "decoder_learned_pos", "encoder_learned_pos",
    "full_context_alignment", "layernorm_embedding", "merge_src_tgt_embed", "no_cross_attention",
    "no_decoder_final_norm", "no_scale_embedding", "no_token_positional_embeddings", "scale_attn", "scale_fc",
    "scale_heads", "scale_resids", "share_all_embeddings", "use_stable_embedding",
)  # fmt: skip
FIXED_NONE = (
    "adaptive_softmax_cutoff", "decoder_layers_to_keep", "decoder_xformers_att_config", "encoder_layers_to_keep",
    "encoder_xformers_att_config", "simul_type",
)  # fmt: skip

# ignored options of training, data and files
TRAINER = frozenset((
    "_name", "adafactor_eps", "adam_betas", "adam_eps", "adaptive_softmax_dropout", "adaptive_softmax_factor",
    "aim_repo", "aim_run_hash", "alignment_heads", "alignment_layer", "all_gather_list_size", "amp",
    "amp_batch_retries", "amp_init_scale", "amp_scale_window", "arch", "azureml_logging", "base_shuffle",
    "base_sublayers", "batch_size", "batch_size_valid", "best_checkpoint_metric", "bf16", "bpe", "bpe_codes",
    "broadcast_buffers", "bucket_cap_mb", "checkpoint_activations", "checkpoint_shard_count", "checkpoint_suffix",
    "clip_norm", "combine_valid_subsets", "continue_once", "cpu", "cpu_offload", "criterion", "curriculum", "data",
    "data_buffer_size", "dataset_impl", "ddp_backend", "ddp_comm_hook", "decoder_embed_path", "decoder_layerdrop",
    "device_id", "disable_validation", "distributed_backend", "distributed_init_method", "distributed_no_spawn",
    "distributed_num_procs", "distributed_port", "distributed_rank", "distributed_world_size",
    "distributed_wrapper", "ema_decay", "ema_fp32", "ema_seed_model", "ema_start_update", "ema_update_freq",
    "empty_cache_freq", "enable_padding_fl_criterion", "encoder_embed_path", "encoder_layerdrop",
    "end_learning_rate", "eval_bleu", "eval_bleu_args", "eval_bleu_detok", "eval_bleu_detok_args",
    "eval_bleu_print_samples", "eval_bleu_remove_bpe", "eval_tokenized_bleu", "export", "fast_stat_sync",
    "find_unused_parameters", "finetune_from_model", "fix_batches_to_gpus", "fixed_validation_seed", "force_anneal",
    "fp16", "fp16_adam_stats", "fp16_init_scale", "fp16_no_flatten_grads", "fp16_scale_tolerance",
    "fp16_scale_window", "fp32_reduce_scatter", "gen_subset", "gpt2_encoder_json", "gpt2_vocab_bpe",
    "gradient_as_bucket_view", "grouped_shuffling", "heartbeat_timeout", "ignore_prefix_size",
    "ignore_unused_valid_subsets", "keep_best_checkpoints", "keep_interval_updates",
    "keep_interval_updates_pattern", "keep_last_epochs", "label_smoothing", "lazy_load", "left_pad_source",
    "left_pad_target", "load_alignments", "load_checkpoint_on_all_dp_ranks", "localsgd_frequency", "log_file",
    "log_format", "log_interval", "lr", "lr_period_updates", "lr_scheduler", "lr_shrink", "max_epoch", "max_lr",
    "max_sentences", "max_sentences_valid", "max_source_positions", "max_target_positions", "max_tokens",
    "max_tokens_valid", "max_update", "max_valid_steps", "maximize_best_checkpoint_metric", "memory_efficient_bf16",
    "memory_efficient_fp16", "min_loss_scale", "min_lr", "min_params_to_wrap", "model_parallel_size", "momentum",
    "no_epoch_checkpoints", "no_last_checkpoints", "no_progress_bar", "no_reshard_after_forward", "no_save",
    "no_save_optimizer_state", "no_seed_provided", "not_fsdp_flatten_parameters", "nprocs_per_node",
    "num_batch_buckets", "num_shards", "num_workers", "offload_activations", "on_cpu_convert_precision",
    "optimizer", "optimizer_overrides", "patience", "pipeline_balance", "pipeline_checkpoint", "pipeline_chunks",
    "pipeline_decoder_balance", "pipeline_decoder_devices", "pipeline_devices", "pipeline_encoder_balance",
    "pipeline_encoder_devices", "pipeline_model_parallel", "plasma_path", "power", "profile", "quant_noise_pq",
    "quant_noise_pq_block_size", "quant_noise_scalar", "quantization_config_path", "raw_text", "relu_dropout",
    "remove_bpe", "report_accuracy", "required_batch_size_multiple", "required_seq_len_multiple",
    "reset_dataloader", "reset_logging", "reset_lr_scheduler", "reset_meters", "reset_optimizer", "restore_file",
    "sacrebleu_char_level", "sacrebleu_lowercase", "sacrebleu_tokenizer", "save_dir", "save_interval",
    "save_interval_updates", "scoring", "seed", "sentence_avg", "sentencepiece_model", "shard_id",
    "skip_invalid_size_inputs_valid_test", "skip_remainder_batch", "slowmo_base_algorithm", "slowmo_momentum",
    "source_lang", "stop_min_lr", "stop_time_hours", "store_ema", "suppress_crashes", "t_mult", "target_lang",
    "task", "tbmf_wrapper", "tensorboard_logdir", "threshold_loss_scale", "tie_adaptive_proj",
    "tie_adaptive_weights", "tokenizer", "total_num_update", "tpu", "train_subset", "truncate_source",
    "update_epoch_batch_itr", "update_freq", "update_ordered_indices_seed", "upsample_primary", "use_bmuf",
    "use_ema", "use_old_adam", "use_plasma_view", "use_sharded_state", "user_dir", "valid_subset",
    "validate_after_updates", "validate_interval", "validate_interval_updates", "wandb_project", "warmup_init_lr",
    "warmup_updates", "weight_decay", "write_checkpoints_asynchronously", "zero_sharding",
))  # fmt: skip

FAMILIES = (
    Family(
        "fairseq",
        {"encoder": BASE, "decoder": BASE | {"cross": True}},
        keys=(
            Key("target_tokens", "vocab"),
            Key("source_tokens", "source_vocab"),
            Sinusoids(),
            *(Key(f"{name}_layers", f"{name}.layers") for name in STACKS),
            *(Key(f"{name}_attention_heads", f"{name}.attention.heads") for name in STACKS),
            *(Key(f"{name}_ffn_embed_dim", f"{name}.feedforward.hidden") for name in STACKS),
            *(normalize_before(name) for name in STACKS),
            activation("activation_fn", *in_both("feedforward.activation"), default="relu"),
            *(Fixed(key, False) for key in FIXED_FALSE),
            *(Fixed(key, None) for key in FIXED_NONE),
            Fixed("base_layers", 0),
            Fixed("share_decoder_input_output_embed", True, required=True),
            *DROPOUT,
        ),
        weights=(
            *renames({f"{name}.embed.table": f"{name}.embed_tokens" for name in STACKS}),
            *renames({f"{name}.norm": f"{name}.layer_norm" for name in STACKS}, optional=True),
            *(Ignored(f"{name}.version") for name in STACKS),
            *(Ignored(f"{name}.embed_positions._float_tensor") for name in STACKS),
            *LAYERS,
        ),
        architectures={
            "TransformerModel": Architecture(
                head={"kind": "tied"},
                weights=(TiedTensor("decoder.output_projection.weight", ("decoder.embed.table.weight",)),),
            )
        },
    ),
)

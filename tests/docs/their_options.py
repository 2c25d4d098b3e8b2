"""The options of other systems that the pages about them must have: `name`, or `name:rows`.

`rows` are those of the parity page that a name belongs to.
"""

TORCHTUNE = """
output_dir:I5 _component_:K1 tokenizer:A1 max_seq_len:A9 dataset:A4 source:A3 split:A3 column:A1 add_eos
policy_model:B1 reward_and_value_model:B1 checkpointer:B1 checkpoint_dir checkpoint_files model_type
ref_policy_checkpointer:B1 value_checkpointer:B3 reward_checkpointer:B1 recipe_checkpoint:I1 resume_from_checkpoint:I1
seed:I2 cudnn_deterministic_mode shuffle:A13 device dtype:G10 batch_size:C10 forward_batch_size:C9 num_steps:A13
ppo_epochs:G1 ppo_batch_size:G1 gradient_accumulation_steps:G2 optimizer:G4 optimizer_in_bwd:G3 lr_scheduler:G6
compile:G12 enable_activation_checkpointing:G9 enable_kv_cache:C8 max_generated_tokens:C3 temperature:C1 top_k:C1
min_response_length:D10 penalise_no_eos:D9 reward_penalty:D9,D10 stop_token_ids:C2 whiten_rewards:D8 gamma:E1 lmbda:E1
loss:F1,F2 epsilon:F1 value_coeff:F2 value_clip_range:F2 kl_coeff:D15 metric_logger:J1 log_every_n_steps:J1
log_peak_memory_stats:G15 profiler log_level:J1 run:K1 ls:K4 cp:K4 cat:K4 validate:K4 download key=value:K1 ~key:K1
"""

TORCHRL = """
KLControllerBase:D16 ConstantKLController:D15 AdaptiveKLController:D16 update:D16 kl_values:D16 kl_coef:D15
init_kl_coef:D16 target:D16 horizon:D16 model:D16 RolloutFromModel:L1 ref_model:B1 reward_model:B1 max_new_tokens:C1
score_clip:D5 kl_scheduler:D16 num_steps EOS_TOKEN_ID:C2 generate:L1 rollout_from_data:L1 create_rollout_td:L3
step_scheduler:D16 generation_config:L1 PromptData:A1 RewardData:A1 KLRewardTransform:D2 TokenizedDatasetLoader:A3
split:A3 max_length:A9 dataset_name:A3 tokenizer_fn:A1 pre_tokenization_hook:A1 root_dir:A12 from_disk:A3
valid_size:J4 num_workers tokenizer_class:A1 tokenizer_model_name:A1 PromptTensorDictTokenizer TensorDictTokenizer
key:A1,A17 label:A1,A17 padding:A10 truncation:A9 return_tensordict:A10 device min_length:A8 get_dataloader
batch_size:G1 block_size:A9 tensorclass_type infinite:A13 prefetch GPT2RewardModel:B4 model_path:B4
compute_reward_loss:F10 save_pretrained:I5 from_pretrained:I5 eval_interval:J4 eval_iters:J4 log_interval:J1
name_or_path:K5 out_dir:K5 init_from:I1 dropout:B17 max_iters:B5 gradient_accumulation_steps:G2 grad_clip:G7
decay_lr:G6 scheduler:G6 T_max:G6 eta_min:G6 lr:G5 weight_decay:G8 betas:G5 always_save_checkpoint:I3 max_epochs:A13
episode_length:C1 ppo_batch_size ppo_num_epochs:G1 num_rollouts_per_epoch:C10 ref_device:H6 dtype:G10 compile:G12
logger:J1 seed:I2 clip_epsilon:F1 entropy_coef:F4 critic_coef:F2 loss_critic_type:F3 clip_value:F2
normalize_advantage:E3 average_gae:E3 gamma:E1 lmbda:E1 shifted:E1 ESS:J2
"""

AREAL = """
n:C5 max_new_tokens:C3 min_new_tokens:C2 greedy:C2 top_p:C1 top_k:C1 temperature:C1 use_cuda_graph
force_cudagraph_recapture force_no_logits_mask:C7 token_normalize_scope:F9 ppo_n_minibatches:G1 kl_ctl:D15 discount:E1
gae_lambda:E1 eps_clip:F1 value_eps_clip:F2 disable_value:E7 max_reward_clip:D5 reward_output_scaling:D6
reward_output_bias:D6 early_stop_imp_ratio:F6 early_stop_kl:F6 use_adaptive_kl_ctl:D16 adv_norm:E3 value_norm:B19
value_norm_type:B19 value_norm_beta:B19 value_norm_eps c_clip:F5 eps_clip_higher:F5 actor_sample_reuse:G1
critic_sample_reuse:G1 fuse_rew_ref recompute_logprob:C7 use_decoupled_loss:F5 behav_imp_weight_cap:F5 path:A2
max_prompt_len:A9 train_bs_n_seqs:G1 fill_to_max_length:A20 train_path:A2 valid_path:A2 max_seqlen:A9 valid_bs_n_seqs
shuffle_dataset:A13 group_size:C5 generation_size:C6 mask_no_eos_with_zero:D11 mask_too_long:D11 rm_output_scaling
ref_ema_eta:B16 group_adv_norm:E4 rw_type:D12 task:B8 check_xml_format:D13 use_dense_reward:D12 reward_delta:D12
check_verifier_status:D17 dataset_filter_threshold:A14 dataset_max_filter_percentage:A14 success_rate_ub:A14
success_rate_lb:A14 no_training:J4 actor:B1 critic:B1 ref:B1 rew:B1 type _class is_critic init_from_scratch:B1
init_critic_from_actor:B3 backend:H1 gradient_checkpointing:G9 bf16:G10 offload:G13 zero_stage:H3 optimizer:G5 adam:G5
empty:G5 lr:G5 weight_decay:G8 beta1:G5 beta2:G5 eps:G5 min_lr_ratio:G6 lr_scheduler_type:G6
warmup_steps_proportion:G6 initial_loss_scale:G10 min_loss_scale:G10 loss_scale_window:G10 hysteresis:G10
gradient_clipping:G7 vllm:C8 max_num_seqs:C9 max_seq_len_to_capture max_model_len gpu_memory_utilization enforce_eager
hybrid_train:G14 enable_prefix_caching:C8 dtype:G10 kv_cache_type num_scheduler_steps multi_step_stream_outputs
block_size swap_space cpu_offload_gb disable_sliding_window enable_chunked_prefill additional_engine_args mb_spec:G2
n_mbs:G2 max_tokens_per_mb:G2 parallel:H2 model_parallel_size:H2 pipeline_parallel_size:H2 data_parallel_size:H2
use_sequence_parallel:H2 device_mesh:H2 actor_gen:H6,H4 actor_train:H6,H4 actor_inf:H6,H4 critic_inf:H6,H4
critic_train:H6,H4 ref_inf:H6,H4 rew_inf:H6,H4 megatron:H1 ddp:H1 overlap_grad_reduce:H1 overlap_param_gather:H1
accumulate_allreduce_grads_in_fp32:H1 grad_reduce_in_fp32:H1 use_distributed_optimizer:H1 wandb:J1 entity:J1
project:J1 name:J1 job_type group notes tags config tensorboard:J1 auto_eval:J4 auto_eval_config:J3,J4
data_names:J3,J4 max_gen_tokens:J3,J4 max_concurrent_jobs:J3,J4 initial_checkpoint_path:J3,J4 prompt_type:J3,J4
eval_job_image:J3,J4 exp_ctrl:I3,J4 total_train_epochs:A13 save_freq_epochs:I3 save_freq_steps:I3 save_freq_secs:I3
ckpt_freq_epochs:I3 ckpt_freq_steps:I3 ckpt_freq_secs:I3 eval_freq_epochs:J4 eval_freq_steps:J4 eval_freq_secs:J4
benchmark_steps benchmark_n_seqs experiment_name:K3 trial_name:K3 mode:H5 seed:I2 debug n_nodes:H5 n_gpus_per_node:H5
nodelist:H5 exclude:H5 partition:H5 image_name:H5 schedule_strategy:H5 recover_mode:I1 recover_retries recover_after
ignore_worker_error allocation_mode:H4 allocation_use_cache:H4 cache_clear_freq:G14 torch_cache_mysophobia:G14
cpus_per_master_worker mem_per_master_worker cpus_per_model_worker mem_per_model_worker rejection_sampling:F5
max_head_offpolicyness:C13 max_concurrent_rollouts:C13 new_tokens_per_chunk:C13 n_rollout_workers:C13
flush_request_timeout:C13
"""

DEEPSPEED_CHAT_STEPS_1_AND_2 = """
data_path:A3,A4 data_split:A5 sft_only_data_path:A6 data_output_path:A12 model_name_or_path:B4,B5
num_padding_at_beginning per_device_train_batch_size:G2 per_device_eval_batch_size max_seq_len:A9 learning_rate:G5
weight_decay:G8 num_train_epochs:B4,B5 gradient_accumulation_steps:G2 lr_scheduler_type:G6 num_warmup_steps:G6
output_dir:I5 seed:I2 local_rank:H1 gradient_checkpointing:G9 dropout:B17 disable_dropout:B17 offload:G13 dtype:G10
zero_stage:H3 lora_dim:B11 lora_module_name:B11 only_optimize_lora:B11 lora_learning_rate:B11 compute_fp32_loss:F11
enable_tensorboard:J1 tensorboard_path:J1 add_eot_token:A19 eot_token:A19 print_loss:J1 eval_interval:J4 eval_iters:J4
beta:B6 label_smoothing:B6 offload_reference_model:G13
"""

DEEPSPEED_CHAT_STEP_3 = """
data_path:A3 data_split:A5 data_output_path:A12 unsupervised_dataset_name:A16 unsupervised_dataset_config_name:A16
unsup_coef:F8 actor_model_name_or_path:B1 critic_model_name_or_path:B3 num_padding_at_beginning
per_device_generation_batch_size:C10 per_device_train_batch_size:C10 per_device_training_batch_size:G1
per_device_mini_train_batch_size:G1 generation_batches:C10 generation_batch_numbers:C10 ppo_epochs:G1
max_prompt_seq_len:A9 max_answer_seq_len:C1 actor_learning_rate:G5 critic_learning_rate:G5 actor_weight_decay:G8
critic_weight_decay:G8 actor_lora_learning_rate:G5 critic_lora_learning_rate:G5 num_train_epochs:A13
lr_scheduler_type:G6 num_warmup_steps:G6 gradient_accumulation_steps:G2 output_dir:I5 seed:I2
preprocessing_num_workers local_rank:H1 enable_hybrid_engine:H4 unpin_actor_parameters:H4 release_inference_cache:G14
inference_tp_size:H4 tp_gather_partition_size:H4 offload:G13 offload_reference_model:G13 offload_reward_model:G13
dtype:G10 actor_zero_stage:H3 critic_zero_stage:H3 actor_gradient_checkpointing:G9 critic_gradient_checkpointing:G9
actor_dropout:B17 critic_dropout:B17 disable_actor_dropout:B17 disable_critic_dropout:B17 actor_lora_dim:B11
critic_lora_dim:B11 actor_lora_module_name:B11 critic_lora_module_name:B11 only_optimize_lora:B11 enable_ema:B15
enable_mixed_precision_lora:B11 compute_fp32_loss:F11 align_overflow enable_tensorboard:J1 tensorboard_path:J1
add_eot_token:A19 print_answers:J3 print_answers_interval:J3 enable_test_mode test_stop_step kl_ctl:D15
clip_reward_value:D5 cliprange:F1 cliprange_value:F2 gamma:E1 lam:E1 chat.py:K7 prompt_eval.py:K7,J4 rw_eval.py:K7
"""

TRL = """
exp_name:K3 seed:I2 task_name:K3 model_name:K3 query_dataset:K3 reward_model:K3 log_with:J1 tracker_kwargs:J1
accelerator_kwargs:H1 project_kwargs:H1 tracker_project_name:J1 remove_unused_columns:A15
push_to_hub_if_best_kwargs:J6 compare_steps:J6 steps:A13 learning_rate:G5 adap_kl_ctrl:D16 init_kl_coef:D16 target:D16
horizon:D16 kl_penalty:D3 gamma:E1 lam:E1 cliprange:F1 cliprange_value:F2 vf_coef:F2 batch_size:C10
mini_batch_size:G1,G2 gradient_accumulation_steps:G1,G2 forward_batch_size:G2 backward_batch_size:G1,G2
global_batch_size:H1 global_backward_batch_size:H1 total_ppo_epochs:A13 ppo_epochs:G1 max_grad_norm:G7
optimize_cuda_cache:G14 optimize_device_cache:G14 early_stopping:F7 target_kl:F7 ratio_threshold:F6
use_score_scaling:D7 use_score_norm:D7 score_clip:D5 whiten_rewards:D8 gradient_checkpointing:G9
is_encoder_decoder:B10 is_peft_model:B11 config:K2 model:B2 ref_model:B1 tokenizer:L1 dataset:L2 optimizer:L2
data_collator:L2 training_data_collator:L2 num_shared_layers:B13,B14 lr_scheduler:L2 generate:L1 query_tensor:L1
length_sampler:A21 return_prompt:L1 generate_ref_response:C12 generation_kwargs:C1,C2 step:L1 queries:L1 responses:L1
scores:L1 response_masks:L1 log_stats:J1 columns_to_log:J3 batched_forward_pass:G2 prepare_dataloader
train_minibatch:L1 compute_rewards:D2 compute_advantages:E1 loss:F1,F2 record_step_stats:J2 gather_stats:H1
create_model_card:J6 save_pretrained:I5 push_to_hub:J6 AutoModelForCausalLMWithValueHead:B2
AutoModelForSeq2SeqLMWithValueHead:B10 create_reference_model:B14 AdaptiveKLController:D15,D16
FixedKLController:D15,D16 add_and_load_reward_modeling_adapter:B9 compute_reward_score:B9 load_in_8bit:B11
load_in_4bit:B11 LengthSampler:A21 BestOfNSampler:C6 TextEnvironment:C15 RewardTrainer:B4 margin:F10
center_rewards_coefficient:F10 set_seed:I2 objective/kl:D2 objective/kl_coef:D16 objective/entropy:J2
ppo/mean_scores:J2 ppo/std_scores:J2 ppo/loss/policy:J2 ppo/loss/value:J2 ppo/policy/clipfrac:J2
ppo/policy/approxkl:J2 ppo/policy/policykl:J2 ppo/val/clipfrac:J2 ppo/val/var_explained:J2
tokens/responses_len_mean:J2 env/reward_mean:J2
"""

TRL_LAST_PPO = """
total_episodes:A13 num_train_epochs:A13 per_device_train_batch_size:C10 gradient_accumulation_steps:C10
num_ppo_epochs:G1 num_mini_batches:G1 local_rollout_forward_batch_size:C9 response_length:C1 stop_token:C2
stop_token_id:C2 temperature:C1 missing_eos_penalty:D9 kl_coef:D15 kl_estimator:D3 cliprange:F1 cliprange_value:F2
vf_coef:F2 gamma:E1 lam:E1 whiten_rewards:D8 learning_rate:G5 model:B1 sft_model_path:B1 ref_model:B1 reward_model:B1
reward_model_path:B1 value_model:B3 num_sample_generations:J3
"""

TRL_GRPO = """
max_steps:A13 num_train_epochs:A13 learning_rate:G5 lr_scheduler_type:G6 warmup_steps:G6 adam_beta1:G5 adam_beta2:G5
weight_decay:G8 max_grad_norm:G7 max_completion_length:C1 temperature:C1 top_p:C1 top_k:C1 beta:D15 epsilon:F1
epsilon_high:F1 scale_rewards:E4 loss_type:F9 importance_sampling_level mask_truncated_completions:D11
sync_ref_model:B16 ref_model_sync_steps:B16 ref_model_mixup_alpha:B16 reward_funcs reward_weights use_vllm:C8
vllm_importance_sampling_correction:F5 peft_config:B11 lora_dropout environment_factory:C15 tools:C15
max_tool_calling_iterations:C15 chat_template_kwargs gradient_checkpointing:G9 bf16:G10 seed:I2 eval_dataset:J4
eval_strategy:J4 eval_steps:J4 num_generations_eval:J4 logging_steps:J1 report_to:J1 save_steps:I3
save_total_limit:I3 resume_from_checkpoint:I1 push_to_hub:J6 hub_model_id:J6 log_completions:J3
reward:J2 reward_std:J2 rewards/right/mean:J2 frac_reward_zero_std:J2 completions/mean_length:J2
completions/max_length:J2 completions/clipped_ratio:J2 kl:J2 entropy:J2 clip_ratio/region_mean:J2
clip_ratio/low_mean:J2 clip_ratio/high_mean:J2 sampling/sampling_logp_difference/max:J2 grad_norm:J2
"""

SECTIONS = (
    ("torchtune", "", TORCHTUNE),
    ("torchrl", "", TORCHRL),
    ("areal", "", AREAL),
    ("deepspeed-chat", "## Steps 1 and 2", DEEPSPEED_CHAT_STEPS_1_AND_2),
    ("deepspeed-chat", "## Step 3", DEEPSPEED_CHAT_STEP_3),
    ("trl", "", TRL),
    ("trl", "## The last PPOTrainer", TRL_LAST_PPO),
    ("grpo-trainer", "", TRL_GRPO),
)
"""(page, heading below which the names stand, or "" for the whole page, names)"""

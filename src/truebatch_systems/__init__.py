"""The systems that come with truebatch. Nothing is imported here: each is named as `module:value`.

The table says what the entry points in pyproject.toml say, for source trees that were never installed.
"""

ENTRY_POINTS: dict[str, dict[str, str]] = {
    "systems": {
        "chinese_gpt": "truebatch_systems.chinese_gpt.system:CHINESE_GPT",
        "seqset_vae": "truebatch_systems.seqset_vae.system:SEQSET_VAE",
        "stitched_llm": "truebatch_systems.stitched_llm.system:STITCHED_LLM",
        "vlm_pruning": "truebatch_systems.vlm_pruning.system:VLM_PRUNING",
    },
    "commands": {
        "demo": "truebatch_systems.chinese_gpt.demo_command:COMMAND",
        "chinese_gpt": "truebatch_systems.chinese_gpt.cli:COMMAND",
        "seqset_vae": "truebatch_systems.seqset_vae.cli:COMMAND",
        "stitched_llm": "truebatch_systems.stitched_llm.cli:COMMAND",
        "vl_reward": "truebatch_systems.vl_reward.cli:COMMAND",
        "vlm_pruning": "truebatch_systems.vlm_pruning.cli:COMMAND",
    },
    "settings": {"vl_reward": "truebatch_systems.vl_reward.config:RewardConfig"},
    "pipelines": {"vl_reward": "truebatch_systems.vl_reward.cli:PIPELINE"},
}

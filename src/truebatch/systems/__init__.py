"""The systems that come with truebatch, by name: `truebatch train NAME`. Each is `module:value`, imported when named."""

SYSTEMS: dict[str, str] = {
    "chinese_gpt": "truebatch.systems.chinese_gpt.system:CHINESE_GPT",
    "hf": "truebatch.hf.finetuning.system:FINETUNING",
    "seqset_vae": "truebatch.systems.seqset_vae.system:SEQSET_VAE",
    "stitched_llm": "truebatch.systems.stitched_llm.system:STITCHED_LLM",
    "vlm_pruning": "truebatch.systems.vlm_pruning.system:VLM_PRUNING",
}

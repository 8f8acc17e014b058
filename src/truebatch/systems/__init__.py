"""The systems that come with truebatch, by name: `truebatch train NAME`. Each is `module:value`, imported when named."""

SYSTEMS: dict[str, str] = {"hf": "truebatch.hf.finetuning.system:FINETUNING"}

"""The programs beside `pretrain_gpt.py`: `tools/NAME.py` in a checkout, `megatron-NAME` once installed."""

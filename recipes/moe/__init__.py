"""Mixture-of-Experts layers.

    x_SBH -> router (logits_TE in fp32 -> ids_TK, gates_TK) -> dispatch (there and back) -> experts (rows, products) -> out_SBH
                 `-> balance (auxiliary losses)    `-> context (integer token counts per expert)

`layer` holds the two backends: ours (`grouped`) and DeepSpeed's stock layer (`deepspeed`), a second implementation to compare with.
"""

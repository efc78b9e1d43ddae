"""What only a CPU needs: where torch is slow there, this program computes by its own means.

`--cpu-kernels off` turns all of it off; then torch computes as in any other program, with other bits. On an accelerator
nothing here matters. Figures: AMD EPYC with avx512_bf16, two threads, bf16 (benchmarks/README.md).

Dropout's masks (kernels.bernoulli_). torch draws one value at a time; here a random number of 64 bits gives four. A
step of MiniLM takes 113 ms instead of 134 with 32 x 24 tokens, and 675 instead of 868 with 32 x 128.

Attention with dropout in 16 bits (a switch of torch: utils/hardware/vendor.py). torch has no kernel for attention with
dropout on the CPU, and composes it in float32. In bf16 the longer step takes 571 ms instead of 675; the shorter one
gains nothing.

Attention's softmax (kernels.safe_softmax). torch searches all scores for rows of -inf. The softmax of 32 x 12 x 128 x
128 scores takes 3.0 ms instead of 8.7, six times in a step of MiniLM, with the same bits.

The gradients of filters (kernels.convolution_backward), only with avx512_bf16 and without AMX. oneDNN's kernel for
large filters takes as long on the smallest images. A backward of ResNet-18 takes 20 ms instead of 34 on 64 images of
32 px, and 60 instead of 77 at 64 px; at 224 px it gains nothing.

Freed memory is kept (allocator.keep_freed_memory). glibc gives it back, and the kernel clears its pages again for the
next step. ResNet-18 at 224 px is 1.05 times as fast (1.03 to 1.14, n = 3), for 24 % more memory, with the same bits.
"""

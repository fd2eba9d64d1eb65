/* The loops over samples and documents that numpy cannot express. `helpers.py` compiles and calls them. */

#include <stdint.h>

/* See `data.greedy_blend.GreedyBlend.table`. Each product and difference is rounded to a double: without
   contraction to one fused operation, as on the processors where Megatron's tables are built. */
void build_blend(int64_t num_components, const double *weights, int64_t *counts, int64_t length,
                 int16_t *components, int64_t *numbers) {
    for (int64_t sample = 0; sample < length; ++sample) {
        const double time = sample > 1 ? (double)sample : 1.0;
        int64_t chosen = 0;
        double most = weights[0] * time - (double)counts[0];
        for (int64_t i = 1; i < num_components; ++i) {
            const double lack = weights[i] * time - (double)counts[i];
            if (lack > most) {
                most = lack;
                chosen = i;
            }
        }
        components[sample] = (int16_t)chosen;
        numbers[sample] = counts[chosen]++;
    }
}

/* numpy's RandomState.shuffle. next: the generator's next 32 random bits. The swap of each element is drawn as numpy
   draws it. Draws do not depend on the elements: a block of them is made first, so that the memory is read ahead. */
#define BLOCK 64
#define SHUFFLE(name, value_t)                                                                                 \
    void name(void *generator, uint32_t (*next)(void *), int64_t length, value_t *values) {                    \
        uint32_t drawn[BLOCK], mask = UINT32_MAX;                                                              \
        for (int64_t last = length - 1; last > 0;) {                                                           \
            int64_t made = 0;                                                                                  \
            for (; made < BLOCK && made < last; ++made) {                                                      \
                const uint32_t most = (uint32_t)(last - made);                                                 \
                while (mask >> 1 >= most)                                                                      \
                    mask >>= 1;                                                                                \
                do                                                                                             \
                    drawn[made] = next(generator) & mask;                                                      \
                while (drawn[made] > most);                                                                    \
                __builtin_prefetch(values + drawn[made], 1);                                                   \
            }                                                                                                  \
            for (int64_t i = 0; i < made; ++i, --last) {                                                       \
                const value_t value = values[last];                                                            \
                values[last] = values[drawn[i]];                                                               \
                values[drawn[i]] = value;                                                                      \
            }                                                                                                  \
        }                                                                                                      \
    }

SHUFFLE(shuffle_4, int32_t)
SHUFFLE(shuffle_8, int64_t)

/* See `data.indices.build_sample_index`. Returns the number of rows that the documents have tokens for. */
#define SAMPLE_INDEX(name, index_t)                                                                            \
    int64_t name(const int32_t *sizes, const index_t *documents, int64_t num_documents, int64_t seq_length,    \
                 int64_t num_rows, index_t *samples) {                                                         \
        int64_t position = 0, start = 0;                                                                       \
        for (int64_t row = 0; row < num_rows; ++row) {                                                         \
            const int64_t boundary = row * seq_length;                                                         \
            while (row && position < num_documents && start + sizes[documents[position]] <= boundary)          \
                start += sizes[documents[position++]];                                                         \
            if (position == num_documents)                                                                     \
                return row;                                                                                    \
            samples[2 * row] = (index_t)position;                                                              \
            samples[2 * row + 1] = (index_t)(boundary - start);                                                \
        }                                                                                                      \
        return num_rows;                                                                                       \
    }

SAMPLE_INDEX(sample_index_int32, int32_t)
SAMPLE_INDEX(sample_index_int64, int64_t)

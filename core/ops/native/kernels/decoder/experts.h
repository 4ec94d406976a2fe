/* A mixture of experts: a router chooses some experts for each row, and their outputs are
 * summed. */
#ifndef FT_EXPERTS_H
#define FT_EXPERTS_H

#include "decoder.h"
#include "linear/linear.h"

enum { FT_MAX_EXPERTS = 1024 };

typedef struct {
    int64_t num_experts, top_k; /* at most FT_MAX_EXPERTS; experts chosen for a row */
    int64_t num_groups, kept_groups; /* groups of neighbouring experts; 1: no groups */
    int32_t is_sigmoid;         /* whether scores are sigmoids, else a softmax */
    int32_t of_chosen;          /* whether only the logits of chosen experts become scores */
    int32_t groups_by_two;      /* whether the best two experts rank a group, else the best one */
    int32_t renorms;            /* whether weights are divided by their sum plus `least` */
    float least, factor;        /* `factor` multiplies the weights last */
} ft_routing;

/* An MLP: `first` computes the input of the activation. */
typedef struct {
    const ft_linear_weight *first, *second;
    ft_activation activation;
} ft_mlp;

typedef struct {
    ft_routing routing;
    const ft_linear_weight *router;
    const float *choice_bias; /* [num_experts] added to scores for the choice only, or NULL */
    const float *factors;     /* [num_experts] factor of each expert's weight, or NULL */
    /* [num_experts]; NULL: another rank has this expert, and adds its output */
    const ft_linear_weight *const *first, *const *second;
    ft_activation activation;
    ft_mlp shared;                     /* an expert for all rows; `first` is NULL without one */
    const ft_linear_weight *shared_gate; /* [1, hidden] its sigmoid scales `shared`; or NULL */
} ft_experts;

/* Write the mixture of x [rows, hidden] to `out`, which may be x. The router reads `routed_by`,
 * which may be x. The outputs of a row's experts are summed in fp32 in the order of choice, best
 * first, then the shared expert's; the sum is rounded once. Returns 0, or -1 when there is no
 * memory. */
int ft_run_experts(const ft_experts *experts, const void *routed_by, const void *x, void *out,
                   int64_t rows, int dtype);

#endif

/* A mixture of experts: a router chooses some for each row, and their outputs are added up. */
#ifndef FT_EXPERTS_H
#define FT_EXPERTS_H

#include "decoder.h"
#include "linear/linear.h"

enum { FT_MAX_EXPERTS = 1024 };

typedef struct {
    int64_t num_experts, top_k; /* at most FT_MAX_EXPERTS; top_k of them */
    int64_t num_groups, kept_groups; /* neighbours among the experts; 1: there are no groups */
    int32_t is_sigmoid;         /* a score is a sigmoid, else a softmax */
    int32_t of_chosen;          /* the softmax is over the chosen alone */
    int32_t groups_by_two;      /* a group is judged by its best two, else by its best */
    int32_t renorms;            /* weights are divided by their sum and `least` */
    float least, factor;        /* by which they are multiplied in the end */
} ft_routing;

/* An MLP: `first` makes what the activation takes. */
typedef struct {
    const ft_linear_weight *first, *second;
    ft_activation activation;
} ft_mlp;

typedef struct {
    ft_routing routing;
    const ft_linear_weight *router;
    const float *choice_bias; /* [num_experts], added to scores in choosing alone, or NULL */
    const float *factors;     /* [num_experts], of the output of each, or NULL */
    /* [num_experts]; NULL: another rank has this one, and adds what it says */
    const ft_linear_weight *const *first, *const *second;
    ft_activation activation;
    ft_mlp shared;                     /* of all rows; first is NULL: there is none */
    const ft_linear_weight *shared_gate; /* one output: a sigmoid on what is shared, or NULL */
} ft_experts;

/* x [rows, hidden] to out, the same; x may be out. The router reads `routed_by`, which may be x.
 * For each row, what its experts say is added up in fp32 in the order in which they were chosen,
 * best first, then what is shared, and rounded once. Returns 0, or -1 when there is no memory. */
int ft_run_experts(const ft_experts *experts, const void *routed_by, const void *x, void *out,
                   int64_t rows, int dtype);

#endif

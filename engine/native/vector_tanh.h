/* tanh, to 4e-7 of it: a quotient of polynomials of x^2 where |x| < TANH_END, beyond which it differs from 1 by less.
 * Not a number stays so. Included behind the vectors of a variant. */
#define TANH_END 8.0f

INLINE vec vec_tanh(vec x) {
    vec negated = vec_mul(vec_max(vec_all(-TANH_END), x), vec_all(-1.0f));
    vec a = vec_mul(vec_max(vec_all(-TANH_END), negated), vec_all(-1.0f)), t = vec_mul(a, a);
    vec p = vec_fma(t, vec_all(1.523058835e-8f), vec_all(2.189478073e-5f));
    p = vec_fma(t, vec_fma(t, vec_fma(t, p, vec_all(3.571605077e-3f)), vec_all(1.344450414e-1f)), vec_all(1.0f));
    vec q = vec_fma(t, vec_all(8.522515031e-7f), vec_all(3.411303624e-4f));
    q = vec_fma(t, vec_fma(t, vec_fma(t, q, vec_all(2.616447024e-2f)), vec_all(4.677783251e-1f)), vec_all(1.0f));
    return vec_mul(a, p) / q;
}
